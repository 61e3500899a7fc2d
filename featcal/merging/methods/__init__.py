"""Merging methods: one file each, named after its method, loaded when the method is asked for."""
