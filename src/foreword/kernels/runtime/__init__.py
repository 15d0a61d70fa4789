"""The environment of compiled code: the compiler's decorators, threads and huge pages."""
