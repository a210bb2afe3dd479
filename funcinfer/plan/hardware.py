"""What the devices are said to be able to do: one table, each figure with its source.

A figure that nobody has published is not here. Whatever needs it is then left out of a floor, and
the report says so. Bandwidths of links are those of one direction. `link_bandwidth` holds between
the `domain` devices that the fast links reach, `network_bandwidth` beyond them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True)
class Hardware:
    """One device. Bytes, bytes a second, operations a second (dense bfloat16), seconds; None where
    no figure is published.

    `latency` is the least time of a collective, whatever its size.
    """

    name: str
    memory: Figure | None = None
    memory_bandwidth: Figure | None = None
    flops: Figure | None = None
    link_bandwidth: Figure | None = None
    domain: Figure | None = None
    network_bandwidth: Figure | None = None
    latency: Figure | None = None

    @property
    def unknown(self) -> tuple[str, ...]:
        """The names of figures that are not published."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is None)

    def replace(self, **values: float) -> "Hardware":
        """The same with figures of one's own. ValueError for a name that is none of a figure.

        >>> find("h200").replace(link_bandwidth=3e11).link_bandwidth
        Figure(value=300000000000.0, source='given')
        """
        known = [f.name for f in fields(self) if f.name != "name"]
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"hardware has no figure {name!r}: {', '.join(known)}")
            if not value > 0:
                raise ValueError(f"{name}={value!r} must be a number above 0")
        return replace(self, **{n: Figure(float(v), "given") for n, v in values.items()})


CANN = "CANN cross-platform migration guide, gitcode.com/cann/ops-nn"
DEVICES = "device table of performance-predict, gitcode.com/Ascend/DrivingSDK"
CLOUD_MATRIX = "Zuo et al., Serving LLMs on Huawei CloudMatrix384, arXiv 2506.12708"
KEYNOTE = "Huawei Connect 2025, keynote of E. Xu, 18 September 2025"
H200_SHEET = "NVIDIA H200 Tensor Core GPU datasheet"
MEASURED_H200 = "measured: torch 2.11, CUDA 13.0, one H200"
MEASURED_CPU = "measured: torch 2.13, 2 cores of an AMD EPYC (Turin)"

HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "910b": Hardware(
            "Ascend 910B (910B2, Atlas 800T A2)",
            memory=Figure(64e9, CANN),
            memory_bandwidth=Figure(1.6e12, CANN),
            flops=Figure(353e12, f"{CANN}: matrix units only; 376 with the vector units"),
            link_bandwidth=Figure(
                196e9, "Atlas 800I A2 product data: HCCS full mesh 392 GB/s, taken as both ways"
            ),
            domain=Figure(8, "Atlas 800T A2: 8 devices a server"),
            network_bandwidth=Figure(25e9, "Atlas 800I A2 product data: 200GE RoCE a device"),
        ),
        "910c": Hardware(
            "Ascend 910C, one of its two dies (CloudMatrix384)",
            memory=Figure(64e9, f"{CLOUD_MATRIX}: 128 GB a package"),
            memory_bandwidth=Figure(1.6e12, f"{CLOUD_MATRIX}: 3.2 TB/s a package"),
            flops=Figure(
                354e12,
                f"{DEVICES}: 708 a package, matrix units only; 376 a die in arXiv 2506.12708",
            ),
            link_bandwidth=Figure(196e9, f"{CLOUD_MATRIX}: UB, 7 x 224 Gbit/s a die and direction"),
            domain=Figure(768, f"{CLOUD_MATRIX}: 384 packages"),
            network_bandwidth=Figure(25e9, f"{CLOUD_MATRIX}: RDMA, 200 Gbit/s a die and direction"),
        ),
        "950dt": Hardware(
            "Ascend 950DT (Atlas 950 SuperPoD)",
            memory=Figure(144e9, KEYNOTE),
            memory_bandwidth=Figure(4.0e12, KEYNOTE),
            flops=Figure(432e12, f"{DEVICES}: matrix units only"),
            link_bandwidth=Figure(
                1.0e12, f"{KEYNOTE}: 2 TB/s, 2.5 times the 910C's 784 GB/s of both ways"
            ),
            domain=Figure(8192, KEYNOTE),
        ),
        "h200": Hardware(
            "NVIDIA H200 SXM (HGX, 8 devices)",
            memory=Figure(141e9, H200_SHEET),
            memory_bandwidth=Figure(4.30e12, f"{MEASURED_H200}: copy; datasheet 4.8e12"),
            flops=Figure(794e12, f"{MEASURED_H200}: product of 8192; datasheet 989e12"),
            link_bandwidth=Figure(450e9, f"{H200_SHEET}: NVLink 900 GB/s, both ways"),
            domain=Figure(8, "NVIDIA HGX H200: 8 devices behind NVSwitch"),
            network_bandwidth=Figure(50e9, "NVIDIA DGX H200 datasheet: 400 Gbit/s a device"),
        ),
        "cpu": Hardware(
            "two cores of a server CPU",
            memory_bandwidth=Figure(49e9, f"{MEASURED_CPU}: read"),
            flops=Figure(454e9, f"{MEASURED_CPU}: product of 2048"),
        ),
    }
)


def find(name: str) -> Hardware:
    """The hardware of a name in the table; ValueError naming those there are.

    >>> find("910b").unknown
    ('latency',)
    """
    if name not in HARDWARE:
        raise ValueError(f"unknown hardware {name!r}; known: {', '.join(HARDWARE)}")
    return HARDWARE[name]
