//! Loops over slices behind the fused operations: written so that the compiler vectorises them, and run with the widest
//! vectors that the processor has. Results do not depend on the number of threads.

#![allow(
    clippy::inline_always,
    reason = "what is not inlined into a kernel is not compiled for the kernel's vector extension"
)]

use macerator::{AutoArch, Simd, WithSimd};
use rayon::prelude::*;

/// Rows of layer norm per unit of parallel work. Sums over rows are taken unit by unit, in order.
const ROWS: usize = 128;
/// Elements per unit of parallel work in element-wise loops.
const UNIT: usize = 16 * 1024;
/// Accumulators of a sum: enough for the compiler to use vectors without changing the order of additions.
const LANES: usize = 16;

/// Defines a function whose loops are compiled for every vector extension and run with the best one: a closure would not
/// be inlined where the extension is switched on.
macro_rules! kernel {
    ($(#[$doc:meta])* fn $name:ident<$life:lifetime $(, const $size:ident: usize)?>($($arg:ident: $type:ty),* $(,)?) $body:block) => {
        $(#[$doc])*
        fn $name<$life $(, const $size: usize)?>($($arg: $type),*) {
            struct Kernel<$life $(, const $size: usize)?> {
                $($arg: $type),*
            }
            impl<$life $(, const $size: usize)?> WithSimd for Kernel<$life $(, $size)?> {
                type Output = ();

                #[inline(always)]
                fn with_simd<S: Simd>(self) {
                    let Self { $($arg),* } = self;
                    $body
                }
            }
            AutoArch::new().dispatch(Kernel $(::<$size>)? { $($arg),* });
        }
    };
}

/// `e^x` with a relative error below 2e-7, for `x <= 88`; zero below -87.3.
///
/// Cody and Waite's reduction `x = n ln 2 + r`, then a polynomial for `e^r` on `|r| <= ln 2 / 2`.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// Adding and subtracting it rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    const SMALLEST: f32 = -87.3;
    let clamped = if x < SMALLEST { SMALLEST } else { x };
    let shifted = clamped.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    let mut p = 1.987_569_1e-4f32;
    for c in [
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        0.166_666_66,
        0.5,
    ] {
        p = p.mul_add(r, c);
    }
    let value = p.mul_add(r * r, r) + 1.0;
    // The low bits of `shifted` are n; moved into the exponent they multiply by 2^n.
    let scale = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < SMALLEST { 0.0 } else { value * scale }
}

/// The normal distribution's `(cdf(x), e^(-x^2 / 2))`: Abramowitz and Stegun 7.1.26, absolute error below 2e-7.
#[inline(always)]
fn normal(x: f32) -> (f32, f32) {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / z.mul_add(0.327_591_1, 1.0);
    let mut p = 1.061_405_4f32;
    for c in [-1.453_152, 1.421_413_8, -0.284_496_74, 0.254_829_6] {
        p = p.mul_add(t, c);
    }
    let bell = exp(-0.5 * x * x);
    let tail = 0.5 * p * t * bell;
    (if x < 0.0 { tail } else { 1.0 - tail }, bell)
}

/// `x cdf(x)`, the Gaussian error linear unit (Hendrycks and Gimpel 2016).
pub(super) fn gelu(x: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    out.par_chunks_mut(UNIT)
        .zip(x.par_chunks(UNIT))
        .for_each(|(out, x)| gelu_unit(out, x));
    out
}

kernel! {
    fn gelu_unit<'a>(out: &'a mut [f32], x: &'a [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x * normal(*x).0;
        }
    }
}

/// Gradient of [`gelu`]: `g (cdf(x) + x pdf(x))`.
pub(super) fn gelu_gradient(x: &[f32], g: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    out.par_chunks_mut(UNIT)
        .zip(x.par_chunks(UNIT))
        .zip(g.par_chunks(UNIT))
        .for_each(|((out, x), g)| gelu_gradient_unit(out, x, g));
    out
}

kernel! {
    fn gelu_gradient_unit<'a>(out: &'a mut [f32], x: &'a [f32], g: &'a [f32]) {
        const PDF_AT_ZERO: f32 = 0.398_942_3;
        for ((out, x), g) in out.iter_mut().zip(x).zip(g) {
            let (cdf, bell) = normal(*x);
            *out = g * (x * PDF_AT_ZERO).mul_add(bell, cdf);
        }
    }
}

#[inline(always)]
fn sum(values: impl Fn(usize) -> f32, len: usize) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = len - len % LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += values(start + lane);
        }
    }
    let mut total = lanes.iter().sum::<f32>();
    for i in whole..len {
        total += values(i);
    }
    total
}

/// Mean, and one over the standard deviation, of a row.
#[inline(always)]
fn moments(row: &[f32], epsilon: f32) -> (f32, f32) {
    let n = row.len() as f32;
    let mean = sum(|i| row[i], row.len()) / n;
    let variance = sum(|i| (row[i] - mean) * (row[i] - mean), row.len()) / n;
    (mean, 1.0 / (variance + epsilon).sqrt())
}

/// Layer norm (Ba, Kiros, Hinton 2016, equation 4) of rows as long as `gamma`.
pub(super) fn layer_norm(x: &[f32], gamma: &[f32], beta: &[f32], epsilon: f32) -> Vec<f32> {
    let unit = ROWS * gamma.len();
    let mut out = vec![0.0; x.len()];
    out.par_chunks_mut(unit)
        .zip(x.par_chunks(unit))
        .for_each(|(out, x)| layer_norm_unit(out, x, gamma, beta, epsilon));
    out
}

kernel! {
    fn layer_norm_unit<'a>(
        out: &'a mut [f32], x: &'a [f32], gamma: &'a [f32], beta: &'a [f32], epsilon: f32,
    ) {
        let width = gamma.len();
        for (out, row) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            let (mean, scale) = moments(row, epsilon);
            for (((out, x), gamma), beta) in out.iter_mut().zip(row).zip(gamma).zip(beta) {
                *out = ((x - mean) * scale).mul_add(*gamma, *beta);
            }
        }
    }
}

/// Gradients of [`layer_norm`] for `x`, `gamma` and `beta`.
pub(super) fn layer_norm_gradient(
    x: &[f32],
    gamma: &[f32],
    g: &[f32],
    epsilon: f32,
) -> [Vec<f32>; 3] {
    let width = gamma.len();
    let unit = ROWS * width;
    let mut out = vec![0.0; x.len()];
    let partial: Vec<(Vec<f32>, Vec<f32>)> = out
        .par_chunks_mut(unit)
        .zip(x.par_chunks(unit))
        .zip(g.par_chunks(unit))
        .map(|((out, x), g)| {
            let (mut for_gamma, mut for_beta) = (vec![0.0; width], vec![0.0; width]);
            layer_norm_gradient_unit(out, &mut for_gamma, &mut for_beta, x, gamma, g, epsilon);
            (for_gamma, for_beta)
        })
        .collect();
    let (mut for_gamma, mut for_beta) = (vec![0.0; width], vec![0.0; width]);
    for (gamma, beta) in partial {
        for_gamma
            .iter_mut()
            .zip(gamma)
            .for_each(|(sum, x)| *sum += x);
        for_beta.iter_mut().zip(beta).for_each(|(sum, x)| *sum += x);
    }
    [out, for_gamma, for_beta]
}

kernel! {
    fn layer_norm_gradient_unit<'a>(
        out: &'a mut [f32],
        for_gamma: &'a mut [f32],
        for_beta: &'a mut [f32],
        x: &'a [f32],
        gamma: &'a [f32],
        g: &'a [f32],
        epsilon: f32,
    ) {
        let width = gamma.len();
        let n = width as f32;
        let (for_gamma, for_beta) = (&mut for_gamma[..width], &mut for_beta[..width]);
        let rows = out.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(g.chunks_exact(width));
        for ((out, x), g) in rows {
            let (mean, scale) = moments(x, epsilon);
            let mean_g = sum(|i| g[i] * gamma[i], width) / n;
            let mean_gx = sum(|i| g[i] * gamma[i] * (x[i] - mean), width) * scale / n;
            for i in 0..width {
                let normed = (x[i] - mean) * scale;
                out[i] = scale * (g[i].mul_add(gamma[i], -mean_g) - normed * mean_gx);
                for_gamma[i] += g[i] * normed;
                for_beta[i] += g[i];
            }
        }
    }
}

/// Sizes of an attention: `qkv` is `[samples, tokens, 3, heads, head width]`, the output `[samples, tokens, heads, head width]`,
/// the weights `[samples, heads, tokens, tokens]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionShape {
    pub(super) samples: usize,
    pub(super) tokens: usize,
    pub(super) heads: usize,
    pub(super) head_width: usize,
}

impl AttentionShape {
    fn width(self) -> usize {
        self.heads * self.head_width
    }

    /// Whether there is a kernel for this head width.
    pub(super) fn supported(head_width: usize) -> bool {
        matches!(head_width, 16 | 32 | 64)
    }
}

/// Causal self-attention (Vaswani et al. 2017, section 3.2.1): the output, and the weights for the gradient.
///
/// # Panics
///
/// If the head width is not [supported](AttentionShape::supported).
pub(super) fn attention(qkv: &[f32], shape: AttentionShape) -> (Vec<f32>, Vec<f32>) {
    match shape.head_width {
        16 => attention_of::<16>(qkv, shape),
        32 => attention_of::<32>(qkv, shape),
        64 => attention_of::<64>(qkv, shape),
        other => panic!("no attention kernel for heads of {other} channels"),
    }
}

/// Gradient of [`attention`] for `qkv`.
///
/// # Panics
///
/// As [`attention`].
pub(super) fn attention_gradient(
    qkv: &[f32],
    weights: &[f32],
    g: &[f32],
    shape: AttentionShape,
) -> Vec<f32> {
    match shape.head_width {
        16 => attention_gradient_of::<16>(qkv, weights, g, shape),
        32 => attention_gradient_of::<32>(qkv, weights, g, shape),
        64 => attention_gradient_of::<64>(qkv, weights, g, shape),
        other => panic!("no attention kernel for heads of {other} channels"),
    }
}

/// The `HEAD` channels from `start`.
#[inline(always)]
fn channels<const HEAD: usize>(values: &[f32], start: usize) -> [f32; HEAD] {
    let mut out = [0.0; HEAD];
    out.copy_from_slice(&values[start..start + HEAD]);
    out
}

/// `rows[t][c]` from `source[start + t * stride + c]`, and its transpose if `turned` is given (`turned[c][t]`).
#[inline(always)]
fn gather<const HEAD: usize>(
    source: &[f32],
    start: usize,
    stride: usize,
    rows: &mut [[f32; HEAD]],
) {
    for (t, row) in rows.iter_mut().enumerate() {
        *row = channels(source, start + t * stride);
    }
}

#[inline(always)]
fn transpose<const HEAD: usize>(rows: &[[f32; HEAD]], turned: &mut [f32]) {
    let tokens = rows.len();
    for c in 0..HEAD {
        for (t, out) in turned[c * tokens..(c + 1) * tokens].iter_mut().enumerate() {
            *out = rows[t][c];
        }
    }
}

/// `out[t] = sum over c of x[c] turned[c][t]`, for the first `out.len()` tokens of `tokens`.
#[inline(always)]
fn dots<const HEAD: usize>(x: &[f32; HEAD], turned: &[f32], tokens: usize, out: &mut [f32]) {
    let n = out.len();
    out.fill(0.0);
    for c in (0..HEAD).step_by(4) {
        let line = |k: usize| &turned[(c + k) * tokens..(c + k) * tokens + n];
        let (a, b, d, e) = (line(0), line(1), line(2), line(3));
        for t in 0..n {
            let low = x[c].mul_add(a[t], x[c + 1].mul_add(b[t], out[t]));
            out[t] = x[c + 2].mul_add(d[t], x[c + 3].mul_add(e[t], low));
        }
    }
}

/// `sum over t of x[t] rows[t]`.
#[inline(always)]
fn combine<const HEAD: usize>(x: &[f32], rows: &[[f32; HEAD]]) -> [f32; HEAD] {
    let mut even = [0.0f32; HEAD];
    let mut odd = [0.0f32; HEAD];
    let pairs = x.chunks_exact(2).zip(rows.chunks_exact(2));
    for (x, rows) in pairs {
        for c in 0..HEAD {
            even[c] = x[0].mul_add(rows[0][c], even[c]);
            odd[c] = x[1].mul_add(rows[1][c], odd[c]);
        }
    }
    if x.len() % 2 == 1 {
        let (x, row) = (x[x.len() - 1], &rows[x.len() - 1]);
        for c in 0..HEAD {
            even[c] = x.mul_add(row[c], even[c]);
        }
    }
    for c in 0..HEAD {
        even[c] += odd[c];
    }
    even
}

/// Turns scores into weights that sum to one.
#[inline(always)]
fn softmax(row: &mut [f32]) {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in row.chunks(LANES) {
        for (largest, x) in lanes.iter_mut().zip(chunk) {
            *largest = if *x > *largest { *x } else { *largest };
        }
    }
    let largest = lanes.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
    for x in row.iter_mut() {
        *x = exp(*x - largest);
    }
    let scale = 1.0 / sum(|i| row[i], row.len());
    for x in row.iter_mut() {
        *x *= scale;
    }
}

fn attention_of<const HEAD: usize>(qkv: &[f32], shape: AttentionShape) -> (Vec<f32>, Vec<f32>) {
    let AttentionShape {
        samples,
        tokens,
        heads,
        ..
    } = shape;
    let width = shape.width();
    let mut out = vec![0.0; samples * tokens * width];
    let mut weights = vec![0.0; samples * heads * tokens * tokens];
    out.par_chunks_mut(tokens * width)
        .zip(weights.par_chunks_mut(heads * tokens * tokens))
        .zip(qkv.par_chunks(3 * tokens * width))
        .for_each(|((out, weights), qkv)| attention_sample::<HEAD>(out, weights, qkv, tokens));
    (out, weights)
}

kernel! {
    fn attention_sample<'a, const HEAD: usize>(
        out: &'a mut [f32], weights: &'a mut [f32], qkv: &'a [f32], tokens: usize,
    ) {
        let width = out.len() / tokens;
        let scale = (HEAD as f32).sqrt().recip();
        let mut rows = vec![[0.0; HEAD]; tokens];
        let mut keys = vec![0.0; tokens * HEAD];
        for (head, weights) in weights.chunks_exact_mut(tokens * tokens).enumerate() {
            let at = head * HEAD;
            gather(qkv, width + at, 3 * width, &mut rows);
            transpose(&rows, &mut keys);
            gather(qkv, 2 * width + at, 3 * width, &mut rows);
            for t in 0..tokens {
                let query = channels::<HEAD>(qkv, 3 * width * t + at).map(|x| x * scale);
                let row = &mut weights[t * tokens..=t * tokens + t];
                dots(&query, &keys, tokens, row);
                softmax(row);
                out[t * width + at..t * width + at + HEAD].copy_from_slice(&combine(row, &rows));
            }
        }
    }
}

fn attention_gradient_of<const HEAD: usize>(
    qkv: &[f32],
    weights: &[f32],
    g: &[f32],
    shape: AttentionShape,
) -> Vec<f32> {
    let AttentionShape { tokens, heads, .. } = shape;
    let width = shape.width();
    let mut out = vec![0.0; qkv.len()];
    out.par_chunks_mut(3 * tokens * width)
        .zip(qkv.par_chunks(3 * tokens * width))
        .zip(weights.par_chunks(heads * tokens * tokens))
        .zip(g.par_chunks(tokens * width))
        .for_each(|(((out, qkv), weights), g)| {
            attention_gradient_sample::<HEAD>(out, qkv, weights, g, tokens);
        });
    out
}

kernel! {
    fn attention_gradient_sample<'a, const HEAD: usize>(
        out: &'a mut [f32], qkv: &'a [f32], weights: &'a [f32], g: &'a [f32], tokens: usize,
    ) {
        let width = g.len() / tokens;
        let scale = (HEAD as f32).sqrt().recip();
        let mut keys = vec![[0.0; HEAD]; tokens];
        let mut rows = vec![[0.0; HEAD]; tokens];
        let mut values = vec![0.0; tokens * HEAD];
        let mut for_keys = vec![[0.0; HEAD]; tokens];
        let mut for_values = vec![[0.0; HEAD]; tokens];
        let mut slope = vec![0.0; tokens];
        for (head, weights) in weights.chunks_exact(tokens * tokens).enumerate() {
            let at = head * HEAD;
            gather(qkv, width + at, 3 * width, &mut keys);
            gather(qkv, 2 * width + at, 3 * width, &mut rows);
            transpose(&rows, &mut values);
            for_keys.fill([0.0; HEAD]);
            for_values.fill([0.0; HEAD]);
            for t in 0..tokens {
                let query = channels::<HEAD>(qkv, 3 * width * t + at);
                let g = channels::<HEAD>(g, width * t + at);
                let weights = &weights[t * tokens..=t * tokens + t];
                let slope = &mut slope[..=t];
                // Gradient of the weights, then of the scores through the softmax.
                dots(&g, &values, tokens, slope);
                let mean = sum(|i| weights[i] * slope[i], weights.len());
                for (slope, weight) in slope.iter_mut().zip(weights) {
                    *slope = weight * (*slope - mean) * scale;
                }
                let for_query = combine(slope, &keys);
                out[3 * width * t + at..3 * width * t + at + HEAD].copy_from_slice(&for_query);
                let pairs = slope.iter().zip(weights).zip(for_keys.iter_mut().zip(for_values.iter_mut()));
                for ((slope, weight), (for_key, for_value)) in pairs {
                    for c in 0..HEAD {
                        for_key[c] = slope.mul_add(query[c], for_key[c]);
                        for_value[c] = weight.mul_add(g[c], for_value[c]);
                    }
                }
            }
            for (t, (for_key, for_value)) in for_keys.iter().zip(&for_values).enumerate() {
                let start = 3 * width * t + at;
                out[start + width..start + width + HEAD].copy_from_slice(for_key);
                out[start + 2 * width..start + 2 * width + HEAD].copy_from_slice(for_value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_and_normal_are_accurate() {
        for i in -8700..=880 {
            let x = i as f32 / 100.0;
            let exact = f64::from(x).exp();
            assert!(
                (f64::from(exp(x)) - exact).abs() <= 3e-7 * exact,
                "exp({x}) = {}",
                exp(x)
            );
        }
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        // Values of the cumulative normal distribution (Abramowitz and Stegun, table 26.1).
        for (x, expected) in [
            (0.0, 0.5),
            (0.5, 0.691_462_46),
            (1.0, 0.841_344_75),
            (2.0, 0.977_249_87),
            (3.0, 0.998_650_1),
        ] {
            assert!((f64::from(normal(x).0) - expected).abs() < 3e-7, "cdf({x})");
            assert!(
                (f64::from(normal(-x).0) - (1.0 - expected)).abs() < 3e-7,
                "cdf(-{x})"
            );
        }
        assert!(exp(f32::NAN).is_nan());
    }
}
