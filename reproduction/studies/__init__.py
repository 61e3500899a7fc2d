"""Studies: one file each, with its settings, its models and what is recorded of them.

Run one with what it needs: dvc repro pipeline/request/dvc.yaml:request@<study>-<role>-<pool>
"""
