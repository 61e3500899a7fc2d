"""What plays the paper's roles: the suites and how their checkpoints and data are got ready."""
