"""Cases of the kernel benchmark, one module for each kernel (see `cases`)."""
