"""The dashboard's icon, and the styles of its page and of its login form."""

from pathlib import Path

STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><rect x="2" y="4" width="20" height="4" rx="2" '
    'fill="#14a87c"/><rect x="2" y="10" width="13" height="4" rx="2" fill="#14a87c"/><rect x="2" y="16" width="8" '
    'height="4" rx="2" fill="#14a87c"/><rect x="17" y="10" width="5" height="4" rx="2" fill="#e0892b"/><rect x="12" '
    'y="16" width="10" height="4" rx="2" fill="#e0892b"/></svg>'
)

FORM_STYLE = """
:root { color-scheme: light dark; --page: #f4f5f7; --card: #fff; --ink: #1b2430; --edge: #d7dce3; }
@media (prefers-color-scheme: dark) { :root { --page: #0f141b; --card: #171e28; --ink: #e6ebf2; --edge: #273140; } }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
form { background: var(--card); border: 1px solid var(--edge); border-radius: 14px; padding: 30px;
  width: min(300px, 80vw); display: grid; gap: 10px; }
svg { width: 40px; }
h1 { margin: 0 0 8px; font-size: 22px; letter-spacing: -0.02em; }
p { margin: 0; color: #d43d51; min-height: 1.5em; }
input, button { font: inherit; padding: 10px 12px; border-radius: 8px; border: 1px solid var(--edge);
  background: var(--page); color: inherit; }
button { background: #119a72; border: 0; color: #fff; font-weight: 600; cursor: pointer; }
"""
