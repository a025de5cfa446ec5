//! From a row of a table to something that can be predicted: cluster, model, training and configuration.

use serde::{Deserialize, Serialize};

use super::presets;
use super::rows::MeasuredRow;
use crate::cluster::{ClusterSpec, GpuType, Link, NodeGroup};
use crate::cost::Problem;
use crate::error::{Error, Infeasible};
use crate::model::{ModelSpec, Transformer};
use crate::plan::{Allocation, Configuration, ParallelDims, ReplicaGroup, Stage};
use crate::training::{Precision, Recompute, Schedule, TrainingSpec};

/// Which constants apply to a case.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CaseKey {
    /// Software that ran it; empty if not stated.
    pub framework: String,
    /// Catalogue name of the GPU.
    pub gpu: String,
}

/// A configuration on a cluster, as described by one row.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// Which constants apply.
    pub key: CaseKey,
    /// Where it ran.
    pub cluster: ClusterSpec,
    /// What ran.
    pub model: ModelSpec,
    /// How it was trained.
    pub training: TrainingSpec,
    /// How it was laid out.
    pub configuration: Configuration,
}

impl Case {
    /// The three inputs.
    pub fn problem(&self) -> Problem<'_> {
        Problem {
            cluster: &self.cluster,
            model: &self.model,
            training: &self.training,
        }
    }
}

impl MeasuredRow {
    /// What the row describes.
    ///
    /// Needed are the model's shape (or the name of a public mixture-of-experts model), `gpu`, `gpus`, `dp`, `tp`, `pp`, `mbs` and
    /// `gbs`; the other columns have defaults: no grouped heads, `4 x hidden` feed-forward, 8 GPUs per node, no interleaving,
    /// context or expert parallelism, no recomputation, bf16.
    ///
    /// # Errors
    /// [`Infeasible::Unsupported`] naming the field that is missing or not understood, or the reason for which the degrees contradict
    /// each other.
    pub fn case(&self) -> Result<Case, Infeasible> {
        let model = self.model()?;
        let gpu = self.gpu()?;
        let gpus = self.need("gpus")?;
        let node = self
            .count("gpus_per_node")?
            .unwrap_or(8)
            .clamp(1, gpus.max(1));
        let dims = ParallelDims {
            dp: self.need("dp")?,
            tp: self.need("tp")?,
            pp: self.need("pp")?,
            vpp: self.degree("vpp")?,
            cp: self.degree("cp")?,
            ep: self.degree("ep")?,
        };
        let zero = match self.count("zero")? {
            None => 0,
            Some(stage @ 0..=3) => stage as u8,
            Some(stage) => {
                return Err(Infeasible::Unsupported(format!(
                    "field zero is {stage}, expected a stage from 0 to 3"
                )));
            }
        };
        let mbs = self.need("mbs")?;
        let gbs = self.need("gbs")?;
        let precision = self.precision()?;
        if dims.gpus() != u64::from(gpus) {
            return Err(Infeasible::Exceeds {
                what: "dp x tp x pp x cp against gpus".to_owned(),
                need: dims.gpus(),
                have: u64::from(gpus),
            });
        }
        let per_round = u64::from(dims.dp) * u64::from(mbs);
        if per_round == 0 || !u64::from(gbs).is_multiple_of(per_round) {
            return Err(Infeasible::Divisibility {
                what: "gbs".to_owned(),
                value: u64::from(gbs),
                divisor: per_round,
                of: "dp x mbs".to_owned(),
            });
        }
        let mut training = TrainingSpec::new(u64::from(gbs), self.count("seq")?.unwrap_or(1));
        training.precision = precision;
        training.flash_attention = self.flag("flash_attn")?.unwrap_or(true);
        training.sequence_parallel = self.flag("sp")?.unwrap_or(false);
        training.memory_margin = 0.0;
        let framework = self.text("framework").unwrap_or_default();
        if precision != Precision::Fp16
            && ["Megatron-LM", "Megatron-Core", "Megatron-Bridge", "NeMo"]
                .iter()
                .any(|name| framework.contains(name))
        {
            // Megatron accumulates and reduces the gradients of bf16 parameters in 32 bits.
            training.gradient_bytes = 4;
        }
        let stages = stages(model.depth(), &dims);
        let configuration = Configuration {
            dims,
            allocation: Allocation { gpus: vec![gpus] },
            replicas: vec![ReplicaGroup {
                count: dims.dp,
                stages,
                virtual_workers: 1,
                accumulation_steps: (u64::from(gbs) / per_round) as u32,
            }],
            micro_batch: mbs,
            schedule: self.schedule()?,
            recompute: self.recompute()?,
            zero,
            sequence_parallel: training.sequence_parallel && dims.tp > 1,
        };
        let key = CaseKey {
            framework: self.text("framework").unwrap_or_default().to_owned(),
            gpu: gpu.name.clone(),
        };
        let cluster = ClusterSpec {
            name: self.id().to_owned(),
            inter: self.inter(gpu, node),
            groups: vec![NodeGroup {
                gpu: gpu.name.clone(),
                nodes: gpus.div_ceil(node),
                gpus_per_node: node,
                intra: None,
                inter: None,
                price_per_gpu_hour: Some(gpu.price_per_gpu_hour.unwrap_or(0.0)),
                spot: false,
                zone: String::new(),
            }],
            gpu_types: Vec::new(),
        };
        Ok(Case {
            key,
            cluster,
            model,
            training,
            configuration,
        })
    }

    /// A count; absent is `None`, anything but a positive whole number (or 0) is unsupported.
    fn count(&self, column: &str) -> Result<Option<u32>, Infeasible> {
        let Some(text) = self.text(column) else {
            return Ok(None);
        };
        match text.parse::<f64>() {
            Ok(value) if value >= 0.0 && value.fract() == 0.0 && value < 4e9 => {
                Ok(Some(value as u32))
            }
            _ => Err(Infeasible::Unsupported(format!(
                "field {column} is {text:?}, expected a count"
            ))),
        }
    }

    fn need(&self, column: &str) -> Result<u32, Infeasible> {
        match self.count(column)? {
            Some(0) => Err(Infeasible::Unsupported(format!(
                "field {column} is 0, expected a positive count"
            ))),
            Some(value) => Ok(value),
            None => Err(missing(column)),
        }
    }

    /// A degree that is 1 where it is not stated.
    fn degree(&self, column: &str) -> Result<u32, Infeasible> {
        match self.text(column) {
            None => Ok(1),
            Some(_) => self.need(column),
        }
    }

    fn flag(&self, column: &str) -> Result<Option<bool>, Infeasible> {
        let Some(text) = self.text(column) else {
            return Ok(None);
        };
        match text.to_ascii_lowercase().as_str() {
            "1" | "1.0" | "true" | "yes" => Ok(Some(true)),
            "0" | "0.0" | "false" | "no" => Ok(Some(false)),
            _ if not_stated(text) => Ok(None),
            _ => Err(unknown(column, text, "0 or 1")),
        }
    }

    fn model(&self) -> Result<ModelSpec, Infeasible> {
        let name = self.text("model").unwrap_or_default();
        if self.text("hidden").is_none()
            && let Some(preset) = presets::find(name, self.count("layers")?)
        {
            self.need("seq")?;
            return Ok(preset);
        }
        let layers = self.need("layers")?;
        let hidden = self.need("hidden")?;
        let heads = self.need("heads")?;
        let vocab = self.need("vocab")?;
        self.need("seq")?;
        let gated = self.flag("gated_mlp")?.unwrap_or(false);
        let mut shape = Transformer::new(layers, hidden, heads, vocab);
        shape.kv_heads = self.count("kv_heads")?.unwrap_or(0);
        shape.ffn = self.count("ffn")?.unwrap_or(0);
        shape.gated_mlp = gated;
        shape.tied_embeddings = !gated;
        shape.biases = !gated;
        if let Some(experts) = self.text("experts")
            && experts != "0"
        {
            shape.experts = self.need("experts")?;
            shape.experts_per_token = self.count("experts_per_token")?.unwrap_or(2);
        }
        let model = ModelSpec::transformer(name, shape);
        model
            .validate()
            .map_err(|error| Infeasible::Unsupported(column_error(&error)))?;
        Ok(model)
    }

    fn gpu(&self) -> Result<&'static GpuType, Infeasible> {
        let name = self.text("gpu").ok_or_else(|| missing("gpu"))?;
        find_gpu(name).ok_or_else(|| {
            Infeasible::Unsupported(format!("field gpu is {name:?}, no GPU of the catalogue"))
        })
    }

    fn precision(&self) -> Result<Precision, Infeasible> {
        let text = self
            .text("precision")
            .unwrap_or("bf16")
            .to_ascii_lowercase();
        let known = [
            ("fp4", Precision::Fp4),
            ("fp8", Precision::Fp8),
            ("bf16", Precision::Bf16),
            ("fp16", Precision::Fp16),
            ("tf32", Precision::Tf32),
            ("fp32", Precision::Fp32),
        ];
        known
            .iter()
            .find(|(name, _)| text.contains(name))
            .map(|&(_, precision)| precision)
            .ok_or_else(|| Infeasible::Unsupported(format!("field precision is {text:?}")))
    }

    fn schedule(&self) -> Result<Schedule, Infeasible> {
        let text = self
            .text("schedule")
            .unwrap_or_default()
            .to_ascii_lowercase();
        match text.as_str() {
            "gpipe" | "afab" => Ok(Schedule::GPipe),
            text if text.starts_with("zb-v") => Ok(Schedule::ZbV),
            text if text.starts_with("zb-2p") => Ok(Schedule::Zb2p),
            text if text.starts_with("zb") => Ok(Schedule::ZbH1),
            text if text.contains("1f1b")
                || text.starts_with("interleaved")
                || text.starts_with("none")
                || not_stated(text) =>
            {
                Ok(Schedule::OneFOneB)
            }
            text => Err(unknown(
                "schedule",
                text,
                "gpipe, 1f1b, interleaved, zb-h1, zb-2p, zb-v or none",
            )),
        }
    }

    fn recompute(&self) -> Result<Recompute, Infeasible> {
        let text = self
            .text("recompute")
            .unwrap_or_default()
            .to_ascii_lowercase();
        match text.as_str() {
            text if text.starts_with("full") => Ok(Recompute::Full),
            text if text.starts_with("selective") => Ok(Recompute::Selective),
            "0" | "false" | "no" => Ok(Recompute::None),
            text if text.starts_with("none") || not_stated(text) => Ok(Recompute::None),
            text => Err(unknown("recompute", text, "none, selective or full")),
        }
    }

    /// Bandwidth between nodes, per node, from texts such as `800 Gbps per node` or `8x HDR200 per node`; without a number the
    /// usual fabric of the GPU's generation.
    fn inter(&self, gpu: &GpuType, node: u32) -> Link {
        let usual = if gpu.memory_bandwidth_gb_s >= 2400.0 {
            400.0
        } else if gpu.memory_bandwidth_gb_s >= 1500.0 {
            200.0
        } else {
            25.0
        };
        let gigabits = self
            .text("inter")
            .and_then(|text| gigabits(text, node))
            .unwrap_or(usual * f64::from(node));
        Link::new(gigabits / 8.0, 10.0)
    }
}

/// A model's error in the words of the table: its columns are the fields of the model's `transformer` table.
fn column_error(error: &Error) -> String {
    match error {
        Error::Field {
            field,
            value,
            allowed,
            ..
        } => {
            let column = field.strip_prefix("transformer.").unwrap_or(field);
            format!("field {column} is {value}, allowed is {allowed}")
        }
        other => other.to_string(),
    }
}

/// Whether a free text says that nothing is known.
fn not_stated(text: &str) -> bool {
    text.is_empty() || text.to_ascii_lowercase().starts_with("not stated")
}

fn unknown(column: &str, text: &str, expected: &str) -> Infeasible {
    Infeasible::Unsupported(format!("field {column} is {text:?}, expected {expected}"))
}

fn missing(column: &str) -> Infeasible {
    Infeasible::Unsupported(format!("missing field {column}"))
}

/// The GPU that a free text names: the longest catalogue name or alias in it; of several joined by `+` the slowest.
fn find_gpu(text: &str) -> Option<&'static GpuType> {
    const ALIASES: &[(&str, &str)] = &[
        ("GB300", "GB300-279"),
        ("GB200", "GB200-186"),
        ("GH200", "GH200-96"),
        ("GH96", "GH200-96"),
        ("B300", "B300-288"),
        ("B200", "B200-180"),
        ("H200", "H200-141"),
        ("H100", "H100-80"),
        ("H800", "H800-80"),
        ("A800", "A800-80"),
        ("A100", "A100-80"),
        ("V100", "V100-16"),
    ];
    if let Some(gpu) = GpuType::catalogue(text) {
        return Some(gpu);
    }
    let plain = |text: &str| {
        text.chars()
            .filter(char::is_ascii_alphanumeric)
            .collect::<String>()
            .to_ascii_uppercase()
    };
    text.split([':', '+'])
        .filter_map(|part| {
            let part = plain(part);
            let names = GpuType::all()
                .iter()
                .map(|gpu| (plain(&gpu.name), gpu.name.as_str()));
            let aliases = ALIASES
                .iter()
                .map(|&(alias, name)| (alias.to_owned(), name));
            let (_, name) = names
                .chain(aliases)
                .filter(|(name, _)| part.contains(name.as_str()))
                .max_by_key(|(name, _)| name.len())?;
            GpuType::catalogue(name)
        })
        .min_by(|a, b| {
            let rate = |gpu: &GpuType| gpu.peak_flops(Precision::Fp16);
            rate(a).total_cmp(&rate(b))
        })
}

/// Gigabits per second and node in a free text: `[COUNT x] [NAME]NUMBER ... [per GPU]`.
fn gigabits(text: &str, node: u32) -> Option<f64> {
    let lower = text.to_ascii_lowercase();
    if !["gb", "hdr", "ndr", "edr"]
        .iter()
        .any(|unit| lower.contains(unit))
    {
        return None;
    }
    let (times, rest) = match lower.split_once('x') {
        Some((count, rest)) => match count.trim().parse::<f64>() {
            Ok(count) => (count, rest),
            Err(_) => (1.0, lower.as_str()),
        },
        None => (1.0, lower.as_str()),
    };
    let digits: String = rest
        .chars()
        .skip_while(|c| !c.is_ascii_digit())
        .take_while(|c| c.is_ascii_digit() || *c == '.')
        .collect();
    let number: f64 = digits.parse().ok()?;
    let per_gpu = rest.contains("per gpu") && !rest.contains("per node");
    Some(number * times * if per_gpu { f64::from(node) } else { 1.0 })
}

/// Layers per stage as even as possible; stages in the middle take what is left over, because the first and the last have the
/// embedding and the head as well.
fn stages(depth: u32, dims: &ParallelDims) -> Vec<Stage> {
    let base = depth / dims.pp;
    let extra = depth % dims.pp;
    let skip = (dims.pp - extra) / 2;
    let mut first_layer = 0;
    (0..dims.pp)
        .map(|index| {
            let layers = base + u32::from(index >= skip && index < skip + extra);
            let stage = Stage {
                group: 0,
                first_layer,
                layers,
                tp: dims.tp,
            };
            first_layer += layers;
            stage
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::rows::Profile;
    use super::*;

    const HEADER: &str = "id,framework,model,layers,hidden,heads,seq,vocab,gpu,gpus,gpus_per_node,inter,dp,tp,pp,mbs,gbs,recompute,precision\n";

    fn row(text: &str) -> MeasuredRow {
        Profile::read(format!("{HEADER}{text}\n").as_bytes(), None)
            .unwrap()
            .rows
            .remove(0)
    }

    #[test]
    fn a_full_row() {
        let case = row("a,Megatron,GPT,24,1024,16,1024,50257,A100-80,8,8,800 Gbps per node,2,2,2,1,8,full,fp16")
            .case()
            .unwrap();
        assert_eq!(case.configuration.replicas[0].accumulation_steps, 4);
        assert_eq!(case.configuration.recompute, Recompute::Full);
        assert!((case.cluster.inter.bandwidth_gb_s - 100.0).abs() < 1e-12);
    }

    #[test]
    fn what_is_missing_is_named() {
        let reason = |text: &str| row(text).case().unwrap_err().to_string();
        assert_eq!(
            reason("a,Megatron,GPT,24,1024,,1024,50257,A100-80,8,8,,2,2,2,1,8,full,fp16"),
            "unsupported: missing field heads"
        );
        assert_eq!(
            reason("a,Megatron,GPT,24,1024,10,1024,50257,A100-80,8,8,,2,2,2,1,8,full,fp16"),
            "unsupported: field heads is 10, allowed is a divisor of hidden = 1024, or head_dim stated as well"
        );
        assert_eq!(
            reason("a,Megatron,GPT,24,1024,16,1024,50257,X9,8,8,,2,2,2,1,8,full,fp16"),
            "unsupported: field gpu is \"X9\", no GPU of the catalogue"
        );
        assert_eq!(
            reason("a,Megatron,GPT,24,1024,16,1024,50257,A100-80,8,8,,2,2,2,3,8,full,fp16"),
            "divisibility: gbs of 8 is not a multiple of 6 (dp x mbs)"
        );
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let reason = |column: &str, cell: &str| {
            let header = HEADER.trim_end();
            let text = format!(
                "{header},{column}\na,Megatron,GPT,24,1024,16,1024,50257,A100-80,8,8,,2,2,2,1,8,full,fp16,{cell}\n"
            );
            let table = Profile::read(text.as_bytes(), None).unwrap();
            table.rows[0].case().err().map(|error| error.to_string())
        };
        for (column, cell, expected) in [
            ("zero", "4", "4, expected a stage from 0 to 3"),
            ("sp", "maybe", "\"maybe\", expected 0 or 1"),
            ("flash_attn", "nan", "\"nan\", expected 0 or 1"),
            (
                "schedule",
                "wave",
                "\"wave\", expected gpipe, 1f1b, interleaved, zb-h1, zb-2p, zb-v or none",
            ),
            ("vpp", "0", "0, expected a positive count"),
            ("cp", "0", "0, expected a positive count"),
        ] {
            assert_eq!(
                reason(column, cell),
                Some(format!("unsupported: field {column} is {expected}"))
            );
        }
        for (column, cell) in [
            ("zero", "3"),
            ("sp", "1"),
            ("flash_attn", "not stated"),
            ("schedule", "interleaved(not stated)"),
            ("schedule", "none"),
        ] {
            assert_eq!(reason(column, cell), None, "{column} = {cell}");
        }
        assert_eq!(
            row("a,Megatron,GPT,24,1024,16,1024,50257,A100-80,8,8,,2,2,2,1,8,some,fp16")
                .case()
                .unwrap_err()
                .to_string(),
            "unsupported: field recompute is \"some\", expected none, selective or full"
        );
    }

    #[test]
    fn free_texts() {
        assert_eq!(find_gpu("16xT4 (4x g4dn.12xlarge)").unwrap().name, "T4");
        assert_eq!(find_gpu("H100-96-500W(HBM2e)").unwrap().name, "H100-96");
        assert_eq!(
            find_gpu("RTX-2080+RTX-3090+Titan-RTX").unwrap().name,
            "RTX2080"
        );
        assert_eq!(
            gigabits("8x HDR200 per node (200 Gbps/GPU)", 8),
            Some(1600.0)
        );
        assert_eq!(gigabits("400 Gbps RDMA per GPU", 8), Some(3200.0));
        assert_eq!(gigabits("4x100 Gb RoCE per node", 8), Some(400.0));
        assert_eq!(gigabits("not stated (H100 cluster)", 8), None);
    }

    #[test]
    fn left_over_layers_go_to_the_middle() {
        let layers: Vec<u32> = stages(10, &ParallelDims::new(1, 1, 4))
            .iter()
            .map(|stage| stage.layers)
            .collect();
        assert_eq!(layers, [2, 3, 3, 2]);
    }
}
