//! The pipeline of a configuration as a task graph: where closed forms are not exact (uneven stages, zero-bubble schedules) the
//! simulated schedule is the reference.

use super::{AnalyticCost, check};
use crate::cost::Problem;
use crate::cost::schedule::{ChunkTimes, Pipeline};
use crate::error::Infeasible;
use crate::plan::{Configuration, TimeBreakdown};
use crate::training::Schedule;

impl AnalyticCost {
    /// The pipeline of one kind of replica, with the times that this model gives its stages. A stage's work is divided evenly over
    /// its chunks, and its backward pass evenly over the gradients of inputs and weights.
    ///
    /// # Errors
    /// The reason if the parts of the configuration contradict each other or there is no such replica.
    pub fn pipeline(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
        replica: usize,
    ) -> Result<Pipeline, Infeasible> {
        check(problem, configuration)?;
        let replicas = configuration
            .replicas
            .get(replica)
            .ok_or_else(|| Infeasible::Exceeds {
                what: "kinds of replicas".to_owned(),
                need: replica as u64 + 1,
                have: configuration.replicas.len() as u64,
            })?;
        let devices = replicas.stages.len();
        let chunks = match configuration.schedule {
            Schedule::ZbV => 2,
            _ => configuration.dims.vpp as usize,
        };
        let times: Vec<_> = replicas
            .stages
            .iter()
            .map(|stage| self.stage_time(problem, configuration, stage, replicas.virtual_workers))
            .collect();
        let device = |stage: usize| {
            if configuration.schedule == Schedule::ZbV && stage >= devices {
                2 * devices - 1 - stage
            } else {
                stage % devices
            }
        };
        let share = 1.0 / chunks as f64;
        let work = (0..devices * chunks)
            .map(|stage| {
                let time = &times[device(stage)];
                let backward = (time.backward + time.backward_collectives) * share;
                ChunkTimes {
                    forward: (time.forward + time.forward_collectives) * share,
                    backward: backward / 2.0,
                    weight: backward / 2.0,
                }
            })
            .collect();
        let transfer = (0..devices * chunks - 1)
            .map(|stage| {
                let (from, to) = (device(stage), device(stage + 1));
                if from == to {
                    0.0
                } else {
                    // The last stage has no link of its own onwards; what returns to the first takes that of the hop before.
                    times[from]
                        .transfer
                        .max(times[from.saturating_sub(1)].transfer)
                }
            })
            .collect();
        Pipeline::new(
            devices,
            work,
            transfer,
            replicas.accumulation_steps as usize,
        )
        .map_err(|error| Infeasible::Unsupported(error.to_string()))
    }

    /// [`time`](Self::time) with the bubble of the simulated schedule in place of the closed form's. Computes in O(n log n) for n
    /// passes per replica.
    ///
    /// # Errors
    /// As [`time`](Self::time), and if the schedule does not exist for the counts.
    pub fn simulated_time(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
    ) -> Result<TimeBreakdown, Infeasible> {
        let mut time = self.time(problem, configuration)?;
        let mut longest = 0.0_f64;
        for replica in 0..configuration.replicas.len() {
            let pipeline = self.pipeline(problem, configuration, replica)?;
            longest = longest.max(pipeline.time(configuration.schedule)?.period);
        }
        time.bubble = (longest - time.compute - time.model_parallel).max(0.0);
        Ok(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{ClusterSpec, Link};
    use crate::model::{Layer, ModelSpec};
    use crate::plan::{Allocation, ParallelDims, ReplicaGroup, Stage};
    use crate::training::{Recompute, TrainingSpec};

    fn cluster() -> ClusterSpec {
        let text = "[[groups]]\ngpu = \"A100-40\"\nnodes = 1\ngpus_per_node = 4\n";
        let mut cluster = ClusterSpec::from_toml(text).unwrap();
        cluster.groups[0].intra = Some(Link::new(300.0, 0.0));
        cluster
    }

    /// Layers that pass nothing on, so that transfers take no time.
    fn model(flops: &[f64]) -> ModelSpec {
        let layer = |forward_flops: f64| Layer {
            name: String::new(),
            parameters: 0.0,
            forward_flops,
            activation_bytes: 0.0,
            output_bytes: 0.0,
            traffic_bytes: 0.0,
            kernels: 1,
            tp_divisor: 1,
            backward_ratio: 2.0,
        };
        ModelSpec {
            name: String::new(),
            transformer: None,
            layers: flops.iter().map(|&flops| layer(flops)).collect(),
        }
    }

    fn configuration(schedule: Schedule, layers: &[u32], vpp: u32, rounds: u32) -> Configuration {
        let mut first_layer = 0;
        let stages = layers
            .iter()
            .map(|&layers| {
                let stage = Stage {
                    group: 0,
                    first_layer,
                    layers,
                    tp: 1,
                };
                first_layer += layers;
                stage
            })
            .collect();
        Configuration {
            dims: ParallelDims {
                vpp,
                ..ParallelDims::new(1, 1, layers.len() as u32)
            },
            allocation: Allocation {
                gpus: vec![layers.len() as u32],
            },
            replicas: vec![ReplicaGroup {
                count: 1,
                stages,
                virtual_workers: 1,
                accumulation_steps: rounds,
            }],
            micro_batch: 1,
            schedule,
            recompute: Recompute::None,
            zero: 0,
            sequence_parallel: false,
        }
    }

    #[test]
    fn even_stages_agree_with_the_closed_form() {
        let (cluster, model) = (cluster(), model(&[1e12; 8]));
        for (schedule, vpp) in [
            (Schedule::GPipe, 1),
            (Schedule::OneFOneB, 1),
            (Schedule::OneFOneB, 2),
            (Schedule::ZbH1, 1),
            (Schedule::Zb2p, 1),
        ] {
            let training = TrainingSpec::new(16, 1);
            let problem = Problem {
                cluster: &cluster,
                model: &model,
                training: &training,
            };
            let configuration = configuration(schedule, &[2; 4], vpp, 16);
            let cost = AnalyticCost::new();
            let closed = cost.time(&problem, &configuration).unwrap().total();
            let simulated = cost
                .simulated_time(&problem, &configuration)
                .unwrap()
                .total();
            assert!(
                (simulated / closed - 1.0).abs() < 1e-9,
                "{schedule:?} x {vpp}: {simulated} against {closed}"
            );
        }
    }

    #[test]
    fn uneven_stages_take_at_least_the_busiest_and_one_pass_before_it() {
        let (cluster, model) = (cluster(), model(&[1e12, 3e12, 2e12, 0.5e12, 2e12, 1e12]));
        let training = TrainingSpec::new(12, 1);
        let problem = Problem {
            cluster: &cluster,
            model: &model,
            training: &training,
        };
        let cost = AnalyticCost::new();
        for schedule in [
            Schedule::GPipe,
            Schedule::OneFOneB,
            Schedule::ZbH1,
            Schedule::Zb2p,
        ] {
            for layers in [[1, 2, 2, 1], [2, 1, 1, 2], [1, 1, 1, 3]] {
                let configuration = configuration(schedule, &layers, 1, 12);
                let pipeline = cost.pipeline(&problem, &configuration, 0).unwrap();
                let simulated = cost.simulated_time(&problem, &configuration).unwrap();
                let period = simulated.compute + simulated.model_parallel + simulated.bubble;
                assert!(period >= pipeline.lower_bound(schedule) * (1.0 - 1e-12));
                assert!(simulated.bubble >= 0.0);
            }
        }
    }
}
