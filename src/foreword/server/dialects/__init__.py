"""The APIs that the server speaks, one folder for each. A dialect knows only its own formats, and no other dialect."""
