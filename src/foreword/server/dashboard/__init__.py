"""The dashboard: a page for operators at /dashboard. See page.py for its parts, and mount.py for access to it."""
