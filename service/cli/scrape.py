"""Two answers of a server's /metrics, and rates between them as Prometheus computes them."""

from __future__ import annotations

import dataclasses
import math
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from nsm_core.errors import NsmError
from service.addresses import is_loopback_url
from service.messages import quoted

TIMEOUT_S = 10.0

Labels = tuple[tuple[str, str], ...]  # sorted by name


class Scrape:
    """One answer of a server: samples by name and labels. `at`: seconds of `time.monotonic()`."""

    def __init__(self, text: str, at: float) -> None:
        """Raises ValueError for text in another format than Prometheus's."""
        self.at = at
        self._samples: dict[str, dict[Labels, float]] = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name][tuple(sorted(sample.labels.items()))] = sample.value

    def samples(self, name: str) -> Mapping[Labels, float]:
        """Empty where the server has no such metric."""
        return self._samples.get(name, {})

    def total(self, name: str) -> float | None:
        """The sum over all labels; None where the server has no such metric."""
        samples = self.samples(name)
        return sum(samples.values()) if samples else None

    def label(self, name: str, label: str) -> str:
        """A label of the metric's first sample, or nothing."""
        return next((dict(labels).get(label, "") for labels in self.samples(name)), "")


def scrape(url: str, key: str | None) -> Scrape:
    """Ask the server at `url`. Raises NsmError in one line when it does not answer with metrics of this product."""
    request = urllib.request.Request(url.rstrip("/") + "/metrics")
    if key is not None:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with _opener(url).open(request, timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
        result = Scrape(text, time.monotonic())
    except urllib.error.HTTPError as error:
        with error:  # it is the answer too
            raise _refusal(url, error) from error
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NsmError(f"{url} does not answer with metrics: {reason}") from error
    if not result.samples("nsm_model_info"):
        raise NsmError(f"{url} has metrics, but not those of a server of this kind")
    return result


def _opener(url: str) -> urllib.request.OpenerDirector:
    """HTTP_PROXY is for other machines."""
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_loopback_url(url) else []))


def _refusal(url: str, error: urllib.error.HTTPError) -> NsmError:
    if error.code in (401, 403):
        return NsmError(f"{url} wants an API key that may read metrics: --key-file (nsm keys new --metrics makes one)")
    return NsmError(f"{url} answered {error.code} {quoted(error.reason)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """From one answer of a server to a later one. A value is None without its metric or without events."""

    before: Scrape
    after: Scrape

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at

    def increases(self, name: str) -> dict[Labels, float]:
        """Of counters, as Prometheus counts: one that fell began anew with its process."""
        earlier = self.before.samples(name)
        return {
            labels: value if value < earlier.get(labels, 0.0) else value - earlier.get(labels, 0.0)
            for labels, value in self.after.samples(name).items()
        }

    def rate(self, name: str) -> float | None:
        """Per second, over all labels together."""
        increases = self.increases(name)
        return sum(increases.values()) / self.seconds if increases and self.seconds else None

    def rates(self, name: str, label: str) -> dict[str, float]:
        """Per second, for each value of a label."""
        if not self.seconds:
            return {}
        sums: dict[str, float] = defaultdict(float)
        for labels, increase in self.increases(name).items():
            sums[dict(labels).get(label, "")] += increase / self.seconds
        return dict(sums)

    def ratio(self, part: str, whole: Iterable[str]) -> float | None:
        """The increase of one counter over that of others together."""
        above = self.increases(part)
        below = sum(sum(self.increases(name).values()) for name in whole)
        return sum(above.values()) / below if above and below > 0 else None

    def quantile(self, q: float, histogram: str) -> float | None:
        """Of the observations in this interval, all labels together; as Prometheus's `histogram_quantile`."""
        counts: dict[float, float] = defaultdict(float)
        for labels, increase in self.increases(f"{histogram}_bucket").items():
            counts[float(dict(labels)["le"])] += increase
        return histogram_quantile(q, sorted(counts.items()))


def histogram_quantile(q: float, buckets: list[tuple[float, float]]) -> float | None:
    """`buckets`: (upper bound, observations up to it), ascending, the last bound infinite. Linear within a bucket."""
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = q * buckets[-1][1]
    below_bound, below_count = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            break
        below_bound, below_count = bound, count
    if math.isinf(bound):
        return below_bound
    width = count - below_count
    return bound if width <= 0 else below_bound + (bound - below_bound) * (rank - below_count) / width
