"""Images, labels, prompts and calibration draws."""
