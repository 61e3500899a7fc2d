"""Stages of dvc.yaml: each reads its settings, calls the engine, and writes its outputs."""
