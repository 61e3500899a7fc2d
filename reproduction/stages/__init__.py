"""The stages of dvc.yaml: each reads its settings, calls one function of the package, and writes
its outputs.
"""
