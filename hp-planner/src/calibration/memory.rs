//! Constants of the memory model, fitted per framework to measured memory.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::least_squares::{Unknown, minimise};
use crate::cluster::GIB;
use crate::cost::analytic::AnalyticCost;
use crate::cost::memory::{MEMORY_BOUNDS, MEMORY_COUNT, MemoryConstants, MemoryUnits};
use crate::profile::{Case, MeasuredRow};

/// Constants of the memory model for one framework.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MemoryFit {
    /// Rows they were fitted to.
    pub rows: usize,
    /// The constants.
    pub constants: MemoryConstants,
}

/// Fewest rows for which a framework's own constants are fitted.
const FEW: usize = 2;

/// Bytes on the fullest device.
fn peak(constants: &MemoryConstants, devices: &[MemoryUnits]) -> f64 {
    devices
        .iter()
        .map(|units| constants.bytes(units).total())
        .fold(0.0, f64::max)
}

fn units(case: &Case) -> Vec<MemoryUnits> {
    AnalyticCost::new()
        .memory_units(&case.problem(), &case.configuration)
        .unwrap_or_default()
}

/// Fits per framework; frameworks with fewer than two rows of measured memory are absent.
pub(super) fn fit(rows: &[&MeasuredRow]) -> BTreeMap<String, MemoryFit> {
    let mut groups: BTreeMap<String, Vec<(Vec<MemoryUnits>, f64)>> = BTreeMap::new();
    for row in rows {
        if let (Some(gib), Ok(case)) = (row.memory_gib(), row.case()) {
            let units = units(&case);
            if !units.is_empty() {
                groups
                    .entry(case.key.framework.clone())
                    .or_default()
                    .push((units, gib));
            }
        }
    }
    groups
        .into_iter()
        .filter(|(_, samples)| samples.len() >= FEW)
        .map(|(framework, samples)| {
            let fit = MemoryFit {
                rows: samples.len(),
                constants: fit_group(&samples),
            };
            (framework, fit)
        })
        .collect()
}

fn array(values: &[f64]) -> MemoryConstants {
    let mut array = [0.0; MEMORY_COUNT];
    array.copy_from_slice(values);
    MemoryConstants::from_array(array)
}

fn fit_group(samples: &[(Vec<MemoryUnits>, f64)]) -> MemoryConstants {
    let prior = MemoryConstants::default().to_array();
    let unknowns: Vec<Unknown> = prior
        .iter()
        .zip(&MEMORY_BOUNDS)
        .map(|(&prior, bound)| Unknown {
            prior,
            deviation: bound.deviation,
            least: bound.least,
            most: bound.most,
        })
        .collect();
    array(&minimise(&unknowns, &prior, &|values| {
        let constants = array(values);
        samples
            .iter()
            .map(|(units, gib)| (peak(&constants, units) / GIB / gib).ln())
            .collect()
    }))
}
