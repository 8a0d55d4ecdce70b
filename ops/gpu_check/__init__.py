"""`make gpu-check`: everything that needs a GPU, in stages with time limits of their own."""
