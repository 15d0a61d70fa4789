"""The server: four APIs over HTTP, tenants, limits. See app.py for how the parts meet."""
