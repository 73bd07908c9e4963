"""PromQL over the gateways that the dashboard's variable chose. Every helper returns one expression."""

from __future__ import annotations

WINDOW = "[$__rate_interval]"  # at least four scrapes, and as long as a pixel is wide
CHOSEN = 'instance=~"$instance"'


def select(metric: str, *matchers: str, suffix: str = "") -> str:
    """A selector. `matchers`: as in PromQL, such as `reason="error"`; `suffix` of the name, such as `_bucket`."""
    return f"{metric}{suffix}{{{', '.join((CHOSEN, *matchers))}}}"


def total(metric: str, *matchers: str, by: str = "") -> str:
    """The sum over instances, for each value of the label `by` when one is named."""
    return f"{_sum(by)}({select(metric, *matchers)})"


def rate(metric: str, *matchers: str, by: str = "") -> str:
    """Per second."""
    return f"{_sum(by)}(rate({select(metric, *matchers)}{WINDOW}))"


def share(part: str, whole: str) -> str:
    """Both are expressions with the same labels. No value where the whole is zero, rather than NaN."""
    return f"{part} / ({whole} > 0)"


def average(metric: str, by: str) -> str:
    """The mean over gateways, for each value of the label `by`."""
    return f"avg by ({by}) ({select(metric)})"


def highest(metric: str, by: str) -> str:
    """For what every gateway reports of the one store they share."""
    return f"max by ({by}) ({select(metric)})"


def lowest(metric: str, by: str) -> str:
    """As `highest`, for what is worst when it is small."""
    return f"min by ({by}) ({select(metric)})"


def overall(metric: str) -> str:
    """The mean over gateways and labels."""
    return f"avg({select(metric)})"


def within(histogram: str, variable: str) -> str:
    """The share of observations at or below the bucket that a variable of the dashboard names."""
    return share(rate(f"{histogram}_bucket", f'le="${variable}"'), rate(f"{histogram}_count"))


def quantile(q: float, histogram: str, *matchers: str, by: str = "") -> str:
    """Of all gateways' observations together: quantiles of quantiles mean nothing."""
    labels = f"{by}, le" if by else "le"
    buckets = select(histogram, *matchers, suffix="_bucket")
    return f"histogram_quantile({q:g}, sum by ({labels}) (rate({buckets}{WINDOW})))"


def mean(histogram: str, *matchers: str) -> str:
    """Of the observations."""
    return share(rate(f"{histogram}_sum", *matchers), rate(f"{histogram}_count", *matchers))


def buckets(histogram: str) -> str:
    """Observations in each bucket within each step, for a heatmap."""
    return f"sum by (le) (increase({select(histogram, suffix='_bucket')}{WINDOW}))"


def _sum(by: str) -> str:
    return f"sum by ({by}) " if by else "sum"
