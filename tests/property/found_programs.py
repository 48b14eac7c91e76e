"""Programs that the search has found, and shrunk. Each failed once.

``KNOWN`` in ``known.py`` has the faults that are not yet mended.
"""

from __future__ import annotations

from programs import Program

FOUND: dict[str, Program] = {}
