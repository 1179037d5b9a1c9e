"""The cost of a user from measured step times.

    seconds of a rank's step = constant + linear * (sum of L) + pair * (sum of L (L + 1) / 2)

fitted to the most recent steps with coefficients that are not negative. Steps that stalled are outliers: Huber's loss
weighs them down (iteratively reweighted least squares), so one of them, or many, do not move the fit.

W ranks; m observations, one per rank and step
"""

from collections import deque

import numpy as np

from turbogr.data.balance import UserCost

OBSERVATIONS = 512
LEAST = 12
"""Observations below which there is no fit."""
ROUNDS = 30
HUBER = 1.345  # in standard deviations; 95 % as good as least squares where the noise is normal
SPREAD = 0.01  # relative deviation of the tokens below which they say nothing about the slope


class CostFit:
    """Keeps what recent steps took; answers the cost that explains it."""

    def __init__(self, observations: int = OBSERVATIONS) -> None:
        self._kept: deque[tuple[float, float, float]] = deque(maxlen=observations)
        self.constant = 0.0
        """Seconds of a step with no row in it, by the latest fit."""

    def observe(self, tokens: np.ndarray, pairs: np.ndarray, seconds: np.ndarray) -> None:
        """One step: of every rank [W] the sum of L, the sum of L (L + 1) / 2, and the seconds it computed."""
        columns = (np.asarray(one, np.float64).tolist() for one in (tokens, pairs, seconds))
        for row in zip(*columns, strict=True):
            # a rank without users says nothing about users
            if row[0] > 0 and row[2] > 0 and np.isfinite(row).all():
                self._kept.append(row)

    def fitted(self) -> UserCost | None:
        """Seconds per token and per pair; None while the observations are too few or too alike to tell."""
        if len(self._kept) < LEAST:
            return None
        rows = np.array(self._kept)
        if rows[:, 0].std() < SPREAD * rows[:, 0].mean():
            return None
        design = np.column_stack([np.ones(len(rows)), rows[:, 0], rows[:, 1]])
        scale = np.maximum(design.max(axis=0), 1e-300)
        found = _robust(design / scale, rows[:, 2]) / scale
        self.constant = float(found[0])
        cost = UserCost(float(found[1]), float(found[2]))
        return cost if cost.linear > 0 or cost.pair > 0 else None


def _robust(design: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[3] coefficients of the least Huber loss, none of them negative."""
    # begins where half of the observations may be outliers: weights by the distance from the median time per work
    rate = y / design[:, 1:].sum(axis=1)
    off = np.abs(rate - np.median(rate))
    weight = _weights(off, 3 * np.median(off))
    found = _not_negative(design, y, weight)
    for _ in range(ROUNDS):
        off = np.abs(y - design @ found)
        # 1.4826 times the median of absolute deviations is the standard deviation of normal noise
        weight = _weights(off, HUBER * 1.4826 * np.median(off))
        before, found = found, _not_negative(design, y, weight)
        if np.allclose(found, before, rtol=1e-9, atol=0):
            break
    return found


def _weights(off: np.ndarray, width: float) -> np.ndarray:
    weights: np.ndarray = np.minimum(1.0, max(float(width), 1e-12) / np.maximum(off, 1e-12))
    return weights


def _not_negative(design: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Weighted least squares over the seven sets of columns; the best one whose coefficients are not negative."""
    root = np.sqrt(weight)
    best, least = np.zeros(design.shape[1]), np.inf
    for columns in ([0, 1, 2], [1, 2], [0, 1], [0, 2], [1], [2], [0]):
        found = np.zeros(design.shape[1])
        found[columns] = np.linalg.lstsq(design[:, columns] * root[:, None], y * root, rcond=None)[0]
        loss = float((weight * (y - design @ found) ** 2).sum())
        if (found >= 0).all() and loss < least:
            best, least = found, loss
            if len(columns) == design.shape[1]:
                break  # no constraint binds
    return best
