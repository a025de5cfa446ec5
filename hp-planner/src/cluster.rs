//! The cluster: groups of equal nodes, their GPUs, links and prices.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::catalogue;
use crate::document::{self, Validate};
use crate::error::{Error, Result};
use crate::training::Precision;

/// A cluster of one or more groups of equal nodes.
///
/// ```
/// use hp_planner::ClusterSpec;
///
/// let cluster = ClusterSpec::from_toml(
///     r#"
///     name = "mixed"
///     [[groups]]
///     gpu = "V100-16"
///     nodes = 2
///     gpus_per_node = 4
///     [[groups]]
///     gpu = "T4"
///     nodes = 2
///     gpus_per_node = 1
///     price_per_gpu_hour = 0.35
///     "#,
/// )?;
/// assert_eq!(cluster.gpus(), 10);
/// # Ok::<(), hp_planner::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterSpec {
    /// Name for reports.
    #[serde(default)]
    pub name: String,
    /// Link between nodes, unless a group has its own.
    #[serde(default = "Link::ethernet_25g")]
    pub inter: Link,
    /// Groups of equal nodes, in the order in which reports name them.
    #[serde(default)]
    pub groups: Vec<NodeGroup>,
    /// GPU types that are not in the catalogue, or that override an entry of the same name.
    #[serde(default)]
    pub gpu_types: Vec<GpuType>,
}

/// Equal nodes: GPU type, counts, links and price.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeGroup {
    /// Name of the GPU type, in `gpu_types` or in the catalogue (see [`GpuType::catalogue`]).
    pub gpu: String,
    /// Number of nodes.
    pub nodes: u32,
    /// GPUs in each node.
    pub gpus_per_node: u32,
    /// Link between the GPUs of a node; the GPU type's own by default.
    #[serde(default)]
    pub intra: Option<Link>,
    /// Link between nodes, per node; the cluster's by default.
    #[serde(default)]
    pub inter: Option<Link>,
    /// Money per GPU and hour, in the currency of the whole file; the GPU type's list price by default.
    #[serde(default)]
    pub price_per_gpu_hour: Option<f64>,
    /// Whether the nodes can be taken away at any time.
    #[serde(default)]
    pub spot: bool,
    /// Zone or region, for reports.
    #[serde(default)]
    pub zone: String,
}

/// A link between devices: time of a transfer of n bytes is latency + n / bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bandwidth in one direction in GB/s (10^9 bytes); per GPU inside a node, per node between nodes.
    pub bandwidth_gb_s: f64,
    /// Latency of one message in microseconds.
    #[serde(default = "default_latency_us")]
    pub latency_us: f64,
}

fn default_latency_us() -> f64 {
    5.0
}

impl Link {
    /// A link of the given bandwidth (GB/s, one direction) and latency (microseconds).
    pub const fn new(bandwidth_gb_s: f64, latency_us: f64) -> Self {
        Self {
            bandwidth_gb_s,
            latency_us,
        }
    }

    /// 25 Gbit/s Ethernet: the usual network of cloud instances without a fast fabric.
    pub fn ethernet_25g() -> Self {
        Self::new(3.125, 25.0)
    }

    /// Seconds for a message of `bytes` bytes.
    pub fn seconds(&self, bytes: f64) -> f64 {
        self.latency_us * 1e-6 + bytes / (self.bandwidth_gb_s * 1e9)
    }

    fn validate(&self) -> Result<()> {
        positive("bandwidth_gb_s", self.bandwidth_gb_s, 1e-3, 1e5, "GB/s")?;
        positive("latency_us", self.latency_us, 0.0, 1e6, "microseconds")
    }
}

/// A type of GPU: what it can do at most, and what it costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuType {
    /// Name by which node groups refer to it.
    pub name: String,
    /// Device memory in GiB (2^30 bytes).
    pub memory_gib: f64,
    /// Memory bandwidth in GB/s (10^9 bytes).
    pub memory_bandwidth_gb_s: f64,
    /// Dense peak rates.
    pub peak: PeakRates,
    /// Fraction of the peak that large matrix products reach, 0 to 1.
    #[serde(default = "default_compute_efficiency")]
    pub compute_efficiency: f64,
    /// Fraction of the memory bandwidth that streaming kernels reach, 0 to 1.
    #[serde(default = "default_memory_efficiency")]
    pub memory_efficiency: f64,
    /// Least time of one kernel in microseconds, launch included.
    #[serde(default = "default_launch_us")]
    pub launch_us: f64,
    /// Link between GPUs of one node.
    pub intra: Link,
    /// List price per GPU and hour in US dollars; groups may state their own.
    #[serde(default)]
    pub price_per_gpu_hour: Option<f64>,
}

fn default_compute_efficiency() -> f64 {
    0.6
}

fn default_memory_efficiency() -> f64 {
    0.8
}

fn default_launch_us() -> f64 {
    5.0
}

/// Dense peak rates in TFLOP/s (10^12); 0 where the hardware lacks the format.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeakRates {
    /// 32-bit floating point.
    pub fp32: f64,
    /// TensorFloat-32.
    #[serde(default)]
    pub tf32: f64,
    /// 16-bit floating point.
    #[serde(default)]
    pub fp16: f64,
    /// bfloat16.
    #[serde(default)]
    pub bf16: f64,
    /// 8-bit floating point.
    #[serde(default)]
    pub fp8: f64,
    /// 4-bit floating point.
    #[serde(default)]
    pub fp4: f64,
}

impl GpuType {
    /// The catalogue's entry of this name, compared without regard to case.
    pub fn catalogue(name: &str) -> Option<&'static GpuType> {
        catalogue::find(name)
    }

    /// All entries of the catalogue.
    pub fn all() -> &'static [GpuType] {
        catalogue::all()
    }

    /// Peak rate in FLOP/s at a precision; formats the hardware lacks run at the rate of the next wider one.
    pub fn peak_flops(&self, precision: Precision) -> f64 {
        let peak = &self.peak;
        let or = |rate: f64, wider: f64| if rate > 0.0 { rate } else { wider };
        let tf32 = or(peak.tf32, peak.fp32);
        let bf16 = or(peak.bf16, peak.fp32);
        let fp8 = or(peak.fp8, or(peak.bf16, peak.fp16));
        1e12 * match precision {
            Precision::Fp32 => peak.fp32,
            Precision::Tf32 => tf32,
            Precision::Fp16 => or(peak.fp16, peak.fp32),
            Precision::Bf16 => bf16,
            Precision::Fp8 => or(fp8, peak.fp32),
            Precision::Fp4 => or(peak.fp4, or(fp8, peak.fp32)),
        }
    }

    /// Device memory in bytes.
    pub fn memory_bytes(&self) -> f64 {
        self.memory_gib * GIB
    }

    fn validate(&self) -> Result<()> {
        if self.name.trim().is_empty() {
            return Err(Error::field("name", "empty", "a name"));
        }
        positive(
            "memory_gib",
            self.memory_gib,
            0.25,
            4096.0,
            "GiB (2^30 bytes)",
        )?;
        positive(
            "memory_bandwidth_gb_s",
            self.memory_bandwidth_gb_s,
            1.0,
            1e5,
            "GB/s",
        )?;
        positive("peak.fp32", self.peak.fp32, 1e-3, 1e5, "TFLOP/s")?;
        for (name, rate) in [
            ("peak.tf32", self.peak.tf32),
            ("peak.fp16", self.peak.fp16),
            ("peak.bf16", self.peak.bf16),
            ("peak.fp8", self.peak.fp8),
            ("peak.fp4", self.peak.fp4),
        ] {
            positive(
                name,
                rate,
                0.0,
                1e6,
                "TFLOP/s, 0 for a format that is lacking",
            )?;
        }
        positive(
            "compute_efficiency",
            self.compute_efficiency,
            0.01,
            1.0,
            "of the peak",
        )?;
        positive(
            "memory_efficiency",
            self.memory_efficiency,
            0.01,
            1.0,
            "of the bandwidth",
        )?;
        positive("launch_us", self.launch_us, 0.0, 1e5, "microseconds")?;
        self.intra
            .validate()
            .map_err(|error| error.within("intra"))?;
        match self.price_per_gpu_hour {
            Some(price) => positive("price_per_gpu_hour", price, 0.0, 1e4, "money per GPU hour"),
            None => Ok(()),
        }
    }
}

/// Most GPUs of a cluster.
const MOST_GPUS: u64 = 1_000_000;

/// Bytes in a GiB.
pub(crate) const GIB: f64 = 1_073_741_824.0;

/// Checks that a value is finite and within [least, most].
pub(crate) fn positive(field: &str, value: f64, least: f64, most: f64, unit: &str) -> Result<()> {
    if value.is_finite() && value >= least && value <= most {
        Ok(())
    } else {
        Err(Error::field(
            field,
            shown(value),
            format!("{} to {} {unit}", shown(least), shown(most)),
        ))
    }
}

/// A number as people write it: with an exponent where it would else have many zeros.
fn shown(value: f64) -> String {
    if value.is_finite() && value.abs() >= 1e12 {
        format!("{value:e}")
    } else {
        value.to_string()
    }
}

/// Checks that a count is within [least, most].
pub(crate) fn count(field: &str, value: u64, least: u64, most: u64) -> Result<()> {
    if (least..=most).contains(&value) {
        Ok(())
    } else {
        Err(Error::field(
            field,
            value,
            format!("a count from {least} to {most}"),
        ))
    }
}

impl ClusterSpec {
    /// Reads a TOML (or, by its extension, JSON) file.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Syntax`] or [`Error::Field`], each naming file, line, field, value and what is allowed.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self> {
        document::read(path.as_ref())
    }

    /// Parses a TOML text.
    ///
    /// # Errors
    /// [`Error::Syntax`] or [`Error::Field`].
    pub fn from_toml(text: &str) -> Result<Self> {
        document::parse_toml(text, None)
    }

    /// Parses a JSON text.
    ///
    /// # Errors
    /// [`Error::Syntax`] or [`Error::Field`].
    pub fn from_json(text: &str) -> Result<Self> {
        document::parse_json(text, None)
    }

    /// A cluster of one group of a catalogue GPU, with the catalogue's links and price.
    ///
    /// # Errors
    /// [`Error::Field`] if the GPU is unknown or a count is 0.
    pub fn homogeneous(gpu: &str, nodes: u32, gpus_per_node: u32) -> Result<Self> {
        let cluster = Self {
            name: format!("{nodes} x {gpus_per_node} {gpu}"),
            inter: Link::ethernet_25g(),
            groups: vec![NodeGroup {
                gpu: gpu.to_owned(),
                nodes,
                gpus_per_node,
                intra: None,
                inter: None,
                price_per_gpu_hour: None,
                spot: false,
                zone: String::new(),
            }],
            gpu_types: Vec::new(),
        };
        Self::validate(&cluster)?;
        Ok(cluster)
    }

    /// Number of GPUs in all groups.
    pub fn gpus(&self) -> u32 {
        self.groups.iter().map(NodeGroup::gpus).sum()
    }

    /// The GPU type of a group: the file's own entry, else the catalogue's.
    ///
    /// # Panics
    /// If `group` is out of range or the cluster was not validated.
    pub fn gpu_type(&self, group: usize) -> &GpuType {
        self.find_gpu(&self.groups[group].gpu)
            .expect("a validated cluster knows its GPU types")
    }

    fn find_gpu(&self, name: &str) -> Option<&GpuType> {
        self.gpu_types
            .iter()
            .find(|gpu| gpu.name.eq_ignore_ascii_case(name))
            .or_else(|| GpuType::catalogue(name))
    }

    /// Link between the GPUs of a node of this group.
    ///
    /// # Panics
    /// As [`gpu_type`](Self::gpu_type).
    pub fn intra(&self, group: usize) -> Link {
        self.groups[group]
            .intra
            .unwrap_or_else(|| self.gpu_type(group).intra)
    }

    /// Link between nodes of this group, per node.
    ///
    /// # Panics
    /// If `group` is out of range.
    pub fn inter(&self, group: usize) -> Link {
        self.groups[group].inter.unwrap_or(self.inter)
    }

    /// Price per GPU and hour in this group.
    ///
    /// # Panics
    /// As [`gpu_type`](Self::gpu_type).
    pub fn price_per_gpu_hour(&self, group: usize) -> f64 {
        self.groups[group]
            .price_per_gpu_hour
            .or(self.gpu_type(group).price_per_gpu_hour)
            .unwrap_or(0.0)
    }

    /// Checks all fields; the readers have already done so.
    ///
    /// # Errors
    /// [`Error::Field`] for the first field that is not allowed.
    pub fn validate(&self) -> Result<()> {
        self.inter
            .validate()
            .map_err(|error| error.within("inter"))?;
        for (index, gpu) in self.gpu_types.iter().enumerate() {
            gpu.validate()
                .map_err(|error| error.within(&format!("gpu_types[{index}]")))?;
            if self.gpu_types[..index]
                .iter()
                .any(|other| other.name.eq_ignore_ascii_case(&gpu.name))
            {
                return Err(Error::field(
                    format!("gpu_types[{index}].name"),
                    format!("{:?} a second time", gpu.name),
                    "a name of its own",
                ));
            }
        }
        if self.groups.is_empty() {
            return Err(Error::field(
                "groups",
                "empty",
                "one or more [[groups]] with gpu, nodes and gpus_per_node",
            ));
        }
        for (index, group) in self.groups.iter().enumerate() {
            self.validate_group(group)
                .map_err(|error| error.within(&format!("groups[{index}]")))?;
        }
        let gpus: u64 = self
            .groups
            .iter()
            .map(|group| u64::from(group.nodes) * u64::from(group.gpus_per_node))
            .sum();
        if gpus > MOST_GPUS {
            return Err(Error::field(
                "groups",
                format!("of {gpus} GPUs together"),
                format!("at most {MOST_GPUS} GPUs"),
            ));
        }
        Ok(())
    }

    fn validate_group(&self, group: &NodeGroup) -> Result<()> {
        count("nodes", u64::from(group.nodes), 1, 100_000)?;
        count("gpus_per_node", u64::from(group.gpus_per_node), 1, 256)?;
        let Some(gpu) = self.find_gpu(&group.gpu) else {
            let known = GpuType::all()
                .iter()
                .chain(&self.gpu_types)
                .map(|gpu| gpu.name.as_str())
                .collect::<Vec<_>>();
            return Err(Error::field(
                "gpu",
                format!("{:?}", group.gpu),
                format!("an entry of gpu_types or one of {}", known.join(", ")),
            ));
        };
        if let Some(link) = &group.intra {
            link.validate().map_err(|error| error.within("intra"))?;
        }
        if let Some(link) = &group.inter {
            link.validate().map_err(|error| error.within("inter"))?;
        }
        match group.price_per_gpu_hour.or(gpu.price_per_gpu_hour) {
            Some(price) => positive("price_per_gpu_hour", price, 0.0, 1e4, "money per GPU hour"),
            None => Err(Error::field(
                "price_per_gpu_hour",
                "missing",
                format!(
                    "a price, because {} has no list price in the catalogue",
                    gpu.name
                ),
            )),
        }
    }
}

impl Validate for ClusterSpec {
    fn validate(&self) -> Result<()> {
        Self::validate(self)
    }
}

impl NodeGroup {
    /// Number of GPUs in the group.
    pub fn gpus(&self) -> u32 {
        self.nodes.saturating_mul(self.gpus_per_node)
    }
}
