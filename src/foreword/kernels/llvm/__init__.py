"""Emitters: functions that write vector and tile instructions as LLVM IR. They import only each other."""
