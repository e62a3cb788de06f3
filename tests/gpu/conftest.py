"""What every test here needs, and the reason that it gives where that is missing. All are collected everywhere."""

from __future__ import annotations

import pytest
import torch

DEVICES = {"test_ranks.py": 2, "test_training_ranks.py": 2}  # one for every other file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.path.parent.name != "gpu":  # a conftest is asked about all that is collected
            continue
        needed = DEVICES.get(item.path.name, 1)
        if found < needed:
            what = "a CUDA device" if needed == 1 else f"{needed} CUDA devices"
            item.add_marker(pytest.mark.skip(reason=f"needs {what}, and this machine has {found}"))
