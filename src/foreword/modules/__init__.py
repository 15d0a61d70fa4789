"""`foreword pml`: checks and runs files of prompt modules, and measures how many right answers linking loses."""
