//! Constants of the memory model: what allocators and frameworks add to what the formulas count.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::least_squares::{Unknown, minimise};
use crate::cluster::GIB;
use crate::cost::analytic::AnalyticCost;
use crate::profile::{Case, MeasuredRow};

/// What is added to the counted bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MemoryConstants {
    /// Rows they were fitted to.
    pub rows: usize,
    /// Fixed GiB: context, library workspaces, communication buffers; 0 to 8.
    pub fixed_gib: f64,
    /// Activations kept in fact over those counted; 0.3 to 3, because temporaries add and fused or reused buffers save.
    pub activation_factor: f64,
    /// Model state in fact over that counted; 0.7 to 1.5: gradients in another format, buffers of flattened parameters.
    pub state_factor: f64,
}

impl Default for MemoryConstants {
    fn default() -> Self {
        Self {
            rows: 0,
            fixed_gib: 1.0,
            activation_factor: 1.0,
            state_factor: 1.0,
        }
    }
}

impl MemoryConstants {
    /// Bytes needed and usable on the fullest device of a case, and which it is.
    pub(crate) fn peak(&self, case: &Case) -> (f64, f64, String) {
        self.apply(&parts(case))
    }

    fn apply(&self, parts: &[Part]) -> (f64, f64, String) {
        let need = |part: &Part| {
            self.state_factor * part.state
                + self.activation_factor * part.activations
                + self.fixed_gib * GIB
        };
        parts
            .iter()
            .max_by(|a, b| need(a).total_cmp(&need(b)))
            .map_or((0.0, 0.0, String::new()), |part| {
                (need(part), part.usable, part.at.clone())
            })
    }
}

struct Part {
    state: f64,
    activations: f64,
    usable: f64,
    at: String,
}

fn parts(case: &Case) -> Vec<Part> {
    AnalyticCost::new()
        .memory(&case.problem(), &case.configuration)
        .unwrap_or_default()
        .into_iter()
        .map(|device| Part {
            state: device.bytes.parameters
                + device.bytes.gradients
                + device.bytes.optimizer
                + device.bytes.buffers,
            activations: device.bytes.activations,
            usable: device.usable,
            at: format!("stage {} on {}", device.stage, case.key.gpu),
        })
        .collect()
}

/// Fits per framework; frameworks without a measured memory are absent.
pub(super) fn fit(rows: &[&MeasuredRow]) -> BTreeMap<String, MemoryConstants> {
    let mut groups: BTreeMap<String, Vec<(Vec<Part>, f64)>> = BTreeMap::new();
    for row in rows {
        if let (Some(gib), Ok(case)) = (row.memory_gib(), row.case()) {
            let parts = parts(&case);
            if !parts.is_empty() {
                groups
                    .entry(case.key.framework.clone())
                    .or_default()
                    .push((parts, gib));
            }
        }
    }
    groups
        .into_iter()
        .map(|(framework, samples)| (framework, fit_group(&samples)))
        .collect()
}

fn fit_group(samples: &[(Vec<Part>, f64)]) -> MemoryConstants {
    let constants = |values: &[f64]| MemoryConstants {
        rows: samples.len(),
        fixed_gib: values[0],
        activation_factor: values[1],
        state_factor: values[2],
    };
    let unknown = |prior, deviation, least, most| Unknown {
        prior,
        deviation,
        least,
        most,
    };
    let unknowns = [
        unknown(1.0, 1.5, 0.0, 8.0),
        unknown(1.0, 0.3, 0.3, 3.0),
        unknown(1.0, 0.1, 0.7, 1.5),
    ];
    let found = minimise(&unknowns, &[1.0, 1.0, 1.0], &|values| {
        let constants = constants(values);
        samples
            .iter()
            .map(|(parts, gib)| (constants.apply(parts).0 / GIB / gib).ln())
            .collect()
    });
    constants(&found)
}
