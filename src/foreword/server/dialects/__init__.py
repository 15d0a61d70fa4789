"""The APIs that the server speaks, one folder each. A dialect knows its own shapes and no other dialect."""
