"""Read and write models in the form of other libraries."""
