"""What a calibration needs before it runs: shapes, operations, memory, from a model without
weights.
"""
