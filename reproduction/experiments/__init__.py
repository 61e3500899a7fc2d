"""params.yaml as dataclasses: which models are merged, calibrated, adapted and studied, with which
settings.
"""
