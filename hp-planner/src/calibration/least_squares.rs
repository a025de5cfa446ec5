//! Bounded, regularised least squares by the method of Levenberg and Marquardt with a numeric Jacobian.

/// One unknown: where it starts (and is drawn to), how strongly, and its bounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Unknown {
    pub prior: f64,
    pub deviation: f64,
    pub least: f64,
    pub most: f64,
}

/// Scale of residuals at which data weigh as much as one standard deviation of the prior.
const NOISE: f64 = 0.05;

/// The unknowns that minimise `sum |residual| / NOISE` (smoothed near 0) plus the squared distances from the priors in
/// standard deviations. Absolute residuals resist outliers and are what a mean absolute error measures; they are reached by
/// reweighting. `residuals` fills one number per observation.
pub(crate) fn minimise(
    unknowns: &[Unknown],
    start: &[f64],
    residuals: &(dyn Fn(&[f64]) -> Vec<f64> + Sync),
) -> Vec<f64> {
    let n = unknowns.len();
    let mut at: Vec<f64> = start.to_vec();
    let mut values = residuals(&at);
    let mut damping = 1e-3;
    let mut objective = cost(unknowns, &at, &values);
    for _ in 0..30 {
        // Forward differences, backwards at the upper bound.
        let columns: Vec<Vec<f64>> = (0..n)
            .map(|index| {
                let unknown = &unknowns[index];
                let mut step = 1e-4 * unknown.deviation;
                if at[index] + step > unknown.most {
                    step = -step;
                }
                let mut moved = at.clone();
                moved[index] += step;
                residuals(&moved)
                    .iter()
                    .zip(&values)
                    .map(|(new, old)| (new - old) / step * unknown.deviation)
                    .collect()
            })
            .collect();
        let weights: Vec<f64> = values
            .iter()
            .map(|r| 1.0 / (NOISE * r.abs().max(0.01)))
            .collect();
        let mut normal = vec![0.0; n * n];
        let mut gradient = vec![0.0; n];
        for i in 0..n {
            for j in i..n {
                let sum: f64 = weights
                    .iter()
                    .zip(columns[i].iter().zip(&columns[j]))
                    .map(|(w, (a, b))| w * a * b)
                    .sum();
                normal[i * n + j] = sum;
                normal[j * n + i] = sum;
            }
            normal[i * n + i] += 2.0;
            gradient[i] = weights
                .iter()
                .zip(columns[i].iter().zip(&values))
                .map(|(w, (a, r))| w * a * r)
                .sum::<f64>()
                + 2.0 * (at[i] - unknowns[i].prior) / unknowns[i].deviation;
        }
        let mut improved = false;
        for _ in 0..12 {
            let mut damped = normal.clone();
            // What is at a bound and pulled outwards stays there.
            let mut right = gradient.clone();
            for i in 0..n {
                damped[i * n + i] *= 1.0 + damping;
                let outwards = (at[i] <= unknowns[i].least && gradient[i] > 0.0)
                    || (at[i] >= unknowns[i].most && gradient[i] < 0.0);
                if outwards {
                    right[i] = 0.0;
                    for j in 0..n {
                        if j != i {
                            damped[i * n + j] = 0.0;
                            damped[j * n + i] = 0.0;
                        }
                    }
                }
            }
            let Some(step) = solve(&damped, &right) else {
                damping *= 10.0;
                continue;
            };
            let next: Vec<f64> = at
                .iter()
                .zip(&step)
                .zip(unknowns)
                .map(|((x, s), u)| (x - s * u.deviation).clamp(u.least, u.most))
                .collect();
            let new_values = residuals(&next);
            let new_objective = cost(unknowns, &next, &new_values);
            if new_objective < objective {
                let gain = (objective - new_objective) / objective.max(1e-300);
                at = next;
                values = new_values;
                objective = new_objective;
                damping = (damping / 5.0).max(1e-9);
                improved = gain > 1e-5;
                break;
            }
            damping *= 4.0;
        }
        if !improved {
            break;
        }
    }
    at
}

fn cost(unknowns: &[Unknown], at: &[f64], values: &[f64]) -> f64 {
    let data: f64 = values
        .iter()
        .map(|r| {
            let size = r.abs();
            // The function whose derivative the weights give: quadratic within 0.01, linear outside.
            let smooth = if size < 0.01 {
                size * size / 0.02 + 0.005
            } else {
                size
            };
            smooth / NOISE
        })
        .sum();
    let prior: f64 = unknowns
        .iter()
        .zip(at)
        .map(|(u, x)| ((x - u.prior) / u.deviation).powi(2))
        .sum();
    if data.is_finite() {
        data + prior
    } else {
        f64::INFINITY
    }
}

/// Solves a symmetric positive definite system by Cholesky's decomposition; `None` if it is not definite.
pub(crate) fn solve(matrix: &[f64], right: &[f64]) -> Option<Vec<f64>> {
    let n = right.len();
    let mut lower = vec![0.0; n * n];
    for i in 0..n {
        for j in 0..=i {
            let mut sum = matrix[i * n + j];
            for k in 0..j {
                sum -= lower[i * n + k] * lower[j * n + k];
            }
            if i == j {
                if sum <= 0.0 || !sum.is_finite() {
                    return None;
                }
                lower[i * n + i] = sum.sqrt();
            } else {
                lower[i * n + j] = sum / lower[j * n + j];
            }
        }
    }
    let mut x = right.to_vec();
    for i in 0..n {
        for k in 0..i {
            x[i] -= lower[i * n + k] * x[k];
        }
        x[i] /= lower[i * n + i];
    }
    for i in (0..n).rev() {
        for k in i + 1..n {
            x[i] -= lower[k * n + i] * x[k];
        }
        x[i] /= lower[i * n + i];
    }
    Some(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unknown(prior: f64, least: f64, most: f64) -> Unknown {
        Unknown {
            prior,
            deviation: 1.0,
            least,
            most,
        }
    }

    #[test]
    fn recovers_a_curve_despite_an_outlier() {
        // y = a exp(b x), a = 2, b = -0.5, one point off by a factor of 3.
        let data: Vec<(f64, f64)> = (0..40)
            .map(|i| {
                let x = f64::from(i) * 0.1;
                let y = 2.0 * (-0.5 * x).exp();
                (x, if i == 7 { 3.0 * y } else { y })
            })
            .collect();
        let unknowns = [unknown(1.5, 0.1, 10.0), unknown(0.0, -5.0, 5.0)];
        let found = minimise(&unknowns, &[1.5, 0.0], &|p| {
            data.iter()
                .map(|(x, y)| (p[0] * (p[1] * x).exp() / y).ln())
                .collect()
        });
        assert!(
            (found[0] - 2.0).abs() < 0.02 && (found[1] + 0.5).abs() < 0.01,
            "{found:?}"
        );
    }

    #[test]
    fn stays_within_bounds_and_near_the_prior_without_data() {
        let unknowns = [unknown(0.5, 0.0, 1.0), unknown(0.25, 0.0, 1.0)];
        let found = minimise(&unknowns, &[0.5, 0.25], &|p| vec![p[0] - 3.0; 100]);
        assert!((found[0] - 1.0).abs() < 1e-9, "{found:?}");
        assert!((found[1] - 0.25).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn solves_a_definite_system() {
        let x = solve(&[4.0, 2.0, 2.0, 3.0], &[10.0, 8.0]).unwrap();
        assert!((x[0] - 1.75).abs() < 1e-12 && (x[1] - 1.5).abs() < 1e-12);
        assert!(solve(&[1.0, 2.0, 2.0, 1.0], &[1.0, 1.0]).is_none());
    }
}
