"""`foreword pml`: checks and runs files of prompt modules, and measures what linking costs in answers."""
