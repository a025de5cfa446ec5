//! Layer profiles: where one shape of work has been measured in several configurations, its time per layer, per micro-batch, per
//! hop and per iteration follows from the rows themselves, by least squares with non-negative coefficients.

use serde::{Deserialize, Serialize};

use super::least_squares::solve;
use crate::cost::shapes::ShapeKey;
use crate::profile::Case;

/// Number of coefficients.
const COUNT: usize = 8;

/// Fewest rows of a shape for a profile: more than the coefficients that matter at once.
const FEW: usize = 6;

/// A profile replaces the formula only within this factor of it: outside of it the rows did not determine the coefficients.
const FACTOR: f64 = 1.5;

/// Coefficients of one shape, on GPUs of one node or over nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerProfile {
    /// The shape.
    pub shape: ShapeKey,
    /// Whether replicas lie in several nodes.
    pub several_nodes: bool,
    /// Rows they were fitted to.
    pub rows: usize,
    /// Seconds per unit of what [`NAMES`](Self::NAMES) says, none negative.
    pub seconds: [f64; COUNT],
}

/// Counts of a configuration that its time is a sum over: passes of the pipeline (micro-batches and the fill, in chunks when
/// interleaved; Narayanan et al. 2021, section 2.2) times blocks of a stage, micro-batches, hops, one, blocks of a stage, whether
/// and how many bytes the replicas reduce, passes. `None` for uneven stages and for replicas of several kinds.
fn counts(case: &Case) -> Option<[f64; COUNT]> {
    let configuration = &case.configuration;
    let [replicas] = configuration.replicas.as_slice() else {
        return None;
    };
    let layers = replicas.stages.first()?.layers;
    if replicas.stages.iter().any(|stage| stage.layers != layers) {
        return None;
    }
    let shape = case.model.transformer.as_ref()?;
    let dims = &configuration.dims;
    let micro_batches = f64::from(replicas.accumulation_steps);
    let hops = f64::from(dims.pp) - 1.0;
    let passes = micro_batches + hops / f64::from(dims.vpp);
    let layers = f64::from(layers);
    let gigabytes = shape.block_parameters(shape.layers.saturating_sub(1)) * layers
        / f64::from(dims.tp)
        * case.training.gradient_element_bytes()
        / 1e9;
    let ranks = f64::from(dims.dp * dims.cp);
    let (reduces, share) = if ranks > 1.0 {
        (1.0, 2.0 * (ranks - 1.0) / ranks)
    } else {
        (0.0, 0.0)
    };
    Some([
        passes * layers,
        micro_batches,
        hops,
        1.0,
        layers,
        reduces * gigabytes,
        share * gigabytes,
        passes,
    ])
}

fn several_nodes(case: &Case) -> bool {
    case.cluster.groups.iter().any(|group| group.nodes > 1)
}

impl LayerProfile {
    /// What each coefficient multiplies.
    pub const NAMES: [&'static str; COUNT] = [
        "block of a pass",
        "micro-batch",
        "hop",
        "iteration",
        "block of a stage",
        "gradient gigabyte",
        "gradient gigabyte on the ring",
        "pass",
    ];

    /// Profiles of all shapes with rows enough. Each row is its case, its shape and the measured seconds.
    pub(super) fn fit<'a>(rows: impl Iterator<Item = (&'a Case, &'a ShapeKey, f64)>) -> Vec<Self> {
        let mut groups: std::collections::BTreeMap<(&ShapeKey, bool), Vec<Vec<f64>>> =
            std::collections::BTreeMap::new();
        for (case, shape, seconds) in rows {
            if let Some(counts) = counts(case) {
                // Relative errors: every row asks for 1.
                let row = counts.iter().map(|count| count / seconds).collect();
                groups
                    .entry((shape, several_nodes(case)))
                    .or_default()
                    .push(row);
            }
        }
        groups
            .into_iter()
            .filter(|(_, rows)| rows.len() >= FEW)
            .map(|((shape, several_nodes), rows)| {
                let found = non_negative(&rows);
                let mut seconds = [0.0; COUNT];
                seconds.copy_from_slice(&found);
                Self {
                    shape: shape.clone(),
                    several_nodes,
                    rows: rows.len(),
                    seconds,
                }
            })
            .collect()
    }

    /// Seconds of an iteration, if the profile is of this case's shape and agrees with the formula's `seconds` by and large.
    pub(super) fn predict(
        profiles: &[Self],
        case: &Case,
        shape: &ShapeKey,
        formula: f64,
    ) -> Option<f64> {
        let nodes = several_nodes(case);
        let at = profiles
            .binary_search_by(|profile| {
                (&profile.shape, profile.several_nodes).cmp(&(shape, nodes))
            })
            .ok()?;
        let counts = counts(case)?;
        let seconds: f64 = profiles[at]
            .seconds
            .iter()
            .zip(counts)
            .map(|(seconds, count)| seconds * count)
            .sum();
        let ratio = seconds / formula;
        (FACTOR.recip()..FACTOR).contains(&ratio).then_some(seconds)
    }
}

/// The non-negative x that minimises `sum (row . x - 1)^2` (Lawson and Hanson 1974, chapter 23: unknowns enter one by one by their
/// gradient and leave when they turn negative).
fn non_negative(rows: &[Vec<f64>]) -> Vec<f64> {
    let n = rows.first().map_or(0, Vec::len);
    // Columns of equal length, so that the ridge of the normal equations means the same to each.
    let scale: Vec<f64> = (0..n)
        .map(|j| {
            let square: f64 = rows.iter().map(|row| row[j] * row[j]).sum();
            if square > 0.0 { square.sqrt() } else { 1.0 }
        })
        .collect();
    let product = |i: usize, j: usize| -> f64 {
        let sum: f64 = rows.iter().map(|row| row[i] * row[j]).sum();
        sum / scale[i] / scale[j]
    };
    let normal: Vec<f64> = (0..n * n).map(|at| product(at / n, at % n)).collect();
    let right: Vec<f64> = (0..n)
        .map(|j| rows.iter().map(|row| row[j]).sum::<f64>() / scale[j])
        .collect();
    let gradient = |x: &[f64], j: usize| -> f64 {
        right[j] - (0..n).map(|i| normal[j * n + i] * x[i]).sum::<f64>()
    };
    let mut x = vec![0.0; n];
    let mut inside = vec![false; n];
    // Every unknown enters and leaves a few times at most; the bound only guards against rounding.
    for _ in 0..8 * n {
        let entering = (0..n)
            .filter(|&j| !inside[j])
            .map(|j| (j, gradient(&x, j)))
            .max_by(|a, b| a.1.total_cmp(&b.1));
        match entering {
            Some((j, slope)) if slope > 1e-9 => inside[j] = true,
            _ => break,
        }
        loop {
            let active: Vec<usize> = (0..n).filter(|&j| inside[j]).collect();
            let k = active.len();
            let mut matrix = vec![0.0; k * k];
            for (a, &i) in active.iter().enumerate() {
                for (b, &j) in active.iter().enumerate() {
                    matrix[a * k + b] = normal[i * n + j];
                }
                matrix[a * k + a] *= 1.0 + 1e-9;
            }
            let side: Vec<f64> = active.iter().map(|&j| right[j]).collect();
            let Some(solution) = solve(&matrix, &side) else {
                return unscaled(&x, &scale);
            };
            let step = active
                .iter()
                .zip(&solution)
                .filter(|&(_, &s)| s <= 0.0)
                .map(|(&j, &s)| x[j] / (x[j] - s).max(1e-300))
                .fold(1.0, f64::min);
            for (&j, &s) in active.iter().zip(&solution) {
                x[j] += step * (s - x[j]);
                if x[j] <= 1e-15 {
                    x[j] = 0.0;
                    inside[j] = false;
                }
            }
            if step >= 1.0 {
                break;
            }
        }
    }
    unscaled(&x, &scale)
}

fn unscaled(x: &[f64], scale: &[f64]) -> Vec<f64> {
    x.iter().zip(scale).map(|(x, scale)| x / scale).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_sums_are_found() {
        // y = 2 a + 0.5 c, the middle column does not take part.
        let rows: Vec<Vec<f64>> = [
            (1.0, 2.0, 3.0),
            (2.0, 1.0, 1.0),
            (4.0, 3.0, 7.0),
            (1.0, 5.0, 9.0),
        ]
        .iter()
        .map(|&(a, b, c)| {
            let y = 2.0 * a + 0.5 * c;
            vec![a / y, b / y, c / y]
        })
        .collect();
        let x = non_negative(&rows);
        for (got, expected) in x.iter().zip([2.0, 0.0, 0.5]) {
            assert!((got - expected).abs() < 1e-6, "{x:?}");
        }
    }

    #[test]
    fn what_would_be_negative_is_left_out() {
        // Unconstrained: x = (1.5, -0.5). With x1 = 0 the best x0 is 1 * 1 + 1 * 2 over 1 + 4 = 0.6.
        let x = non_negative(&[vec![1.0, 1.0], vec![2.0, 4.0]]);
        assert!((x[0] - 0.6).abs() < 1e-6 && x[1].abs() < 1e-12, "{x:?}");
    }
}
