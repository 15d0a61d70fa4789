"""`foreword pml`: checks and runs files of prompt modules."""
