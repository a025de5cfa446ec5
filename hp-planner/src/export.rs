//! What a chosen plan means to the launchers of other frameworks.
//!
//! Option names are those that Megatron-LM's `arguments.py`, DeepSpeed's configuration reference and torchtitan's `job_config.py`
//! document. These launchers run equal replicas; a plan with unequal ones can be written for `iidp` only.

use std::fmt;
use std::fmt::Write as _;
use std::str::FromStr;

use serde_json::json;

use crate::error::{Error, Infeasible, Result};
use crate::plan::{ParallelPlan, ReplicaGroup};
use crate::planner::Planner;
use crate::training::{Optimizer, Precision, Recompute, Schedule};

/// For whom a plan is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportFormat {
    /// Command-line flags of Megatron-LM's `pretrain_gpt.py`.
    Megatron,
    /// DeepSpeed's JSON configuration.
    DeepSpeed,
    /// TOML configuration of torchtitan.
    Torchtitan,
    /// JSON list of ranks: GPU type, virtual workers, accumulation steps, local batch.
    Iidp,
}

impl FromStr for ExportFormat {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "megatron" => Ok(Self::Megatron),
            "deepspeed" => Ok(Self::DeepSpeed),
            "torchtitan" => Ok(Self::Torchtitan),
            "iidp" => Ok(Self::Iidp),
            _ => Err(Error::field(
                "export",
                format!("{text:?}"),
                "megatron, deepspeed, torchtitan or iidp",
            )),
        }
    }
}

impl fmt::Display for ExportFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Megatron => "megatron",
            Self::DeepSpeed => "deepspeed",
            Self::Torchtitan => "torchtitan",
            Self::Iidp => "iidp",
        })
    }
}

impl Planner {
    /// A plan of this planner as input of another program.
    ///
    /// # Errors
    /// [`Error::Infeasible`] if the program cannot express the plan.
    pub fn export(&self, plan: &ParallelPlan, format: ExportFormat) -> Result<String> {
        match format {
            ExportFormat::Megatron => self.megatron(plan),
            ExportFormat::DeepSpeed => self.deepspeed(plan),
            ExportFormat::Torchtitan => self.torchtitan(plan),
            ExportFormat::Iidp => self.iidp(plan),
        }
    }

    fn megatron(&self, plan: &ParallelPlan) -> Result<String> {
        let configuration = &plan.configuration;
        equal_replicas(plan, "Megatron-LM")?;
        let Some(shape) = &self.model().transformer else {
            return Err(unsupported("Megatron-LM trains transformers only"));
        };
        let dims = &configuration.dims;
        let depth = shape.layers;
        if !depth.is_multiple_of(dims.pp * dims.vpp) {
            return Err(unsupported(
                "Megatron-LM needs equal numbers of layers per stage",
            ));
        }
        let mut flags = vec![
            format!("--num-layers {depth}"),
            format!("--hidden-size {}", shape.hidden),
            format!("--num-attention-heads {}", shape.heads),
            format!("--ffn-hidden-size {}", shape.ffn()),
            format!("--seq-length {}", self.training().seq),
            format!(
                "--max-position-embeddings {}",
                shape.max_positions.max(self.training().seq)
            ),
            format!("--tensor-model-parallel-size {}", dims.tp),
            format!("--pipeline-model-parallel-size {}", dims.pp),
            format!("--context-parallel-size {}", dims.cp),
            format!("--micro-batch-size {}", configuration.micro_batch),
            format!("--global-batch-size {}", configuration.global_batch()),
        ];
        if shape.kv_heads() != shape.heads {
            flags.push("--group-query-attention".to_owned());
            flags.push(format!("--num-query-groups {}", shape.kv_heads()));
        }
        if shape.gated_mlp {
            flags.push("--swiglu".to_owned());
        }
        if !shape.tied_embeddings {
            flags.push("--untie-embeddings-and-output-weights".to_owned());
        }
        if shape.max_positions == 0 {
            flags.push("--position-embedding-type rope".to_owned());
        }
        if shape.experts > 0 {
            flags.push(format!("--num-experts {}", shape.experts));
            flags.push(format!("--moe-router-topk {}", shape.experts_per_token));
            flags.push(format!("--expert-model-parallel-size {}", dims.ep));
        }
        if dims.vpp > 1 {
            let layers = depth / (dims.pp * dims.vpp);
            flags.push(format!("--num-layers-per-virtual-pipeline-stage {layers}"));
        }
        if configuration.sequence_parallel {
            flags.push("--sequence-parallel".to_owned());
        }
        if configuration.zero > 0 {
            flags.push("--use-distributed-optimizer".to_owned());
        }
        match configuration.recompute {
            Recompute::None => {}
            Recompute::Selective => flags.push("--recompute-granularity selective".to_owned()),
            Recompute::Full => flags.push(
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
                    .to_owned(),
            ),
        }
        match self.training().precision {
            Precision::Bf16 => flags.push("--bf16".to_owned()),
            Precision::Fp16 => flags.push("--fp16".to_owned()),
            Precision::Fp8 => flags.push("--bf16 --fp8-format hybrid".to_owned()),
            _ => {}
        }
        flags.push(
            match self.training().optimizer {
                Optimizer::Adam => "--optimizer adam",
                Optimizer::Sgd | Optimizer::Momentum => "--optimizer sgd",
            }
            .to_owned(),
        );
        Ok(flags.join(" \\\n") + "\n")
    }

    fn deepspeed(&self, plan: &ParallelPlan) -> Result<String> {
        let replicas = equal_replicas(plan, "DeepSpeed")?;
        let precision = self.training().precision;
        let config = json!({
            "train_batch_size": plan.configuration.global_batch(),
            "train_micro_batch_size_per_gpu": plan.configuration.micro_batch,
            "gradient_accumulation_steps": replicas.micro_batches(),
            "zero_optimization": {
                "stage": plan.configuration.zero,
                "overlap_comm": self.training().overlap_reduce,
            },
            "bf16": { "enabled": precision == Precision::Bf16 },
            "fp16": { "enabled": precision == Precision::Fp16 },
        });
        Ok(format!("{config:#}\n"))
    }

    fn torchtitan(&self, plan: &ParallelPlan) -> Result<String> {
        let configuration = &plan.configuration;
        let replicas = equal_replicas(plan, "torchtitan")?;
        let dims = &configuration.dims;
        let (replicate, shard) = if configuration.zero > 0 {
            (1, dims.dp)
        } else {
            (dims.dp, 1)
        };
        let schedule = match (configuration.schedule, dims.vpp) {
            (Schedule::GPipe, _) => "GPipe",
            (Schedule::OneFOneB, 1) => "1F1B",
            (Schedule::OneFOneB, _) => "Interleaved1F1B",
            (Schedule::ZbH1 | Schedule::Zb2p, _) => "InterleavedZeroBubble",
            (Schedule::ZbV, _) => "ZBVZeroBubble",
        };
        let recompute = match configuration.recompute {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Full => "full",
        };
        let local = if dims.pp > 1 {
            u64::from(configuration.micro_batch) * replicas.micro_batches()
        } else {
            u64::from(configuration.micro_batch)
        };
        let mut text = String::new();
        let lines = [
            "[training]".to_owned(),
            format!("local_batch_size = {local}"),
            format!("global_batch_size = {}", configuration.global_batch()),
            format!("seq_len = {}", self.training().seq),
            String::new(),
            "[parallelism]".to_owned(),
            format!("data_parallel_replicate_degree = {replicate}"),
            format!("data_parallel_shard_degree = {shard}"),
            format!("tensor_parallel_degree = {}", dims.tp),
            format!("pipeline_parallel_degree = {}", dims.pp),
            format!("pipeline_parallel_schedule = \"{schedule}\""),
            format!(
                "pipeline_parallel_microbatch_size = {}",
                configuration.micro_batch
            ),
            format!("context_parallel_degree = {}", dims.cp),
            format!("expert_parallel_degree = {}", dims.ep),
            String::new(),
            "[activation_checkpoint]".to_owned(),
            format!("mode = \"{recompute}\""),
        ];
        for line in lines {
            let _ = writeln!(text, "{line}");
        }
        Ok(text)
    }

    fn iidp(&self, plan: &ParallelPlan) -> Result<String> {
        let configuration = &plan.configuration;
        let ranks: Vec<_> = configuration
            .each_replica()
            .map(|replica| {
                let stages: Vec<_> = replica
                    .stages
                    .iter()
                    .map(|stage| {
                        json!({
                            "gpu": self.cluster().groups[stage.group].gpu,
                            "first_layer": stage.first_layer,
                            "layers": stage.layers,
                            "tensor_parallel": stage.tp,
                        })
                    })
                    .collect();
                json!({
                    "virtual_workers": replica.virtual_workers,
                    "accumulation_steps": replica.accumulation_steps,
                    "local_batch": configuration.micro_batch,
                    "stages": stages,
                })
            })
            .collect();
        let layout = json!({
            "global_batch": configuration.global_batch(),
            "replicas": ranks,
        });
        Ok(format!("{layout:#}\n"))
    }
}

/// The only kind of replica of a plan.
fn equal_replicas<'a>(plan: &'a ParallelPlan, program: &str) -> Result<&'a ReplicaGroup> {
    match plan.configuration.replicas.as_slice() {
        [only] if only.virtual_workers == 1 => Ok(only),
        _ => Err(unsupported(&format!(
            "{program} runs equal replicas without virtual workers, the plan has others"
        ))),
    }
}

fn unsupported(why: &str) -> Error {
    Error::Infeasible(Infeasible::Unsupported(why.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ClusterSpec;
    use crate::model::ModelSpec;
    use crate::plan::Allocation;
    use crate::training::TrainingSpec;

    fn planner() -> Planner {
        Planner::new(
            ClusterSpec::homogeneous("A100-80", 1, 8).unwrap(),
            ModelSpec::llama("llama3-8b", 32, 4096, 32, 8, 14_336, 128_256),
            TrainingSpec {
                zero: vec![1],
                recompute: vec![Recompute::Full],
                ..TrainingSpec::new(64, 2048).data_parallel(2)
            },
        )
    }

    #[test]
    fn launchers_get_their_own_names() {
        let planner = planner();
        let plan = planner.reassign(&Allocation { gpus: vec![8] }, 64).unwrap();
        let text = |format| planner.export(&plan, format).unwrap();
        let flags = text(ExportFormat::Megatron);
        for flag in [
            "--num-query-groups 8",
            "--swiglu",
            "--micro-batch-size 2",
            "--global-batch-size 64",
            "--use-distributed-optimizer",
            "--recompute-granularity full",
        ] {
            assert!(flags.contains(flag), "{flag} in {flags}");
        }
        let json: serde_json::Value = serde_json::from_str(&text(ExportFormat::DeepSpeed)).unwrap();
        assert_eq!(json["gradient_accumulation_steps"], 4);
        assert_eq!(json["zero_optimization"]["stage"], 1);
        let toml: toml::Table = text(ExportFormat::Torchtitan).parse().unwrap();
        assert_eq!(
            toml["parallelism"]["data_parallel_shard_degree"].as_integer(),
            Some(8)
        );
        assert_eq!(toml["activation_checkpoint"]["mode"].as_str(), Some("full"));
        let json: serde_json::Value = serde_json::from_str(&text(ExportFormat::Iidp)).unwrap();
        assert_eq!(json["replicas"].as_array().unwrap().len(), 8);
    }

    #[test]
    fn unequal_replicas_are_refused_by_name() {
        let planner = planner();
        let mut plan = planner.reassign(&Allocation { gpus: vec![8] }, 64).unwrap();
        plan.configuration.replicas[0].virtual_workers = 2;
        let error = planner.export(&plan, ExportFormat::DeepSpeed).unwrap_err();
        assert!(
            error.to_string().contains("DeepSpeed runs equal replicas"),
            "{error}"
        );
        assert!(planner.export(&plan, ExportFormat::Iidp).is_ok());
        assert!("slurm".parse::<ExportFormat>().is_err());
    }
}
