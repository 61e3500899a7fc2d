"""Temporary."""

from contextlib import AbstractContextManager


class Handle:
    def __init__(self, t):
        self.t = t


class Spool(AbstractContextManager):
    def __init__(self, device_bytes=None, host_bytes=None, folder=None):
        self.host_bytes = 0

    def keep(self, t):
        return Handle(t)

    def get(self, h):
        return h.t

    def drop(self, h):
        h.t = None

    def __exit__(self, *a):
        return None
