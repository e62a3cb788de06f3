from __future__ import annotations

from tests.engine.server.conftest import served as served
