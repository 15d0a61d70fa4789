"""What compiled code needs to run: the compiler's decorators, threads and huge pages."""
