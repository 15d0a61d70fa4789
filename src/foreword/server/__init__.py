"""The server: OpenAI's dialect over HTTP, tenants, limits. See app.py for how the parts meet."""
