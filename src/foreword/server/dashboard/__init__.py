"""The dashboard: a page for operators at /dashboard. See page.py for its parts, mount.py for who may see it."""
