//! Accumulation and measurement in one pass over memory.
//!
//! Gradient accumulation reads the gradient, reads the accumulator and writes it back. Memory bounds its speed, so the
//! square of each gradient element can be summed on the way for next to nothing.
//!
//! # Error bound
//! The product of two `f32` (or `bf16`, `f16`) is exact in `f64`. Each pass works in chunks of 65,536 elements; in a chunk
//! eight partial sums in `f64` take every eighth element, so a sum of `n` squares passes through at most
//! `8,192 + 3 + n / 65,536` roundings and its relative error stays below that many times 2^-53: less than 1.1e-12 for
//! 10^8 elements. The bound for a dot product is the same relative to the sum of the absolute products. `f64` gradients
//! add one rounding per product.
//!
//! Chunks are the same for every number of threads and their sums are added in order, so the result does not depend on
//! the number of threads, to the bit.

use crate::element::{AccumulatorElement, Element};
use crate::error::{Error, Result};

/// Elements of one chunk: 256 KiB of `f32`, so that a chunk of gradient and accumulator fits a second-level cache.
const CHUNK: usize = 1 << 16;
/// Independent partial sums: enough to hide the latency of the additions.
const LANES: usize = 8;
/// Below this length threads cost more than they bring.
#[cfg(feature = "rayon")]
const PARALLEL_FROM: usize = 1 << 19;

/// What one pass over a gradient `g` and its accumulator `a` found.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Measured {
    /// |g|^2.
    pub norm_sq: f64,
    /// a . g, with the accumulator as it was before this gradient was added.
    pub dot: f64,
}

/// Adds `grad` into `acc` and returns |grad|^2, in one pass over memory.
///
/// The accumulator gets exactly what `*a += g` would give; NaN and infinite elements propagate into it likewise, and
/// make the result non-finite. Computes in O(n) over the threads of the current rayon pool for 2^19 elements and more
/// (feature `rayon`). The [module](self) has the error bound.
///
/// # Errors
/// [`Error::Length`] if the slices differ in length; nothing is added then.
///
/// # Examples
/// ```
/// let mut acc = vec![1.0f32; 4];
/// let norm_sq = adaptive_batch::accumulate_and_measure(&mut acc, &[1.0f32, 2.0, 3.0, 4.0])?;
/// assert_eq!(norm_sq, 30.0);
/// assert_eq!(acc, [2.0, 3.0, 4.0, 5.0]);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
pub fn accumulate_and_measure<A: AccumulatorElement, G: Element>(
    acc: &mut [A],
    grad: &[G],
) -> Result<f64> {
    check_len("gradient", acc.len(), grad.len())?;
    let [norm_sq] = fold_mut(acc, grad, |a, g| {
        *a = a.plus(g);
        let g = g.to_f64();
        [g * g]
    });
    Ok(norm_sq)
}

/// Adds `weight * grad` into `acc` and returns |grad|^2 of the gradient *without* the weight.
///
/// # Errors
/// [`Error::Length`] if the slices differ in length; nothing is added then.
///
/// # Examples
/// ```
/// let mut acc = vec![0.0f32; 2];
/// let norm_sq = adaptive_batch::accumulate_scaled_and_measure(&mut acc, &[3.0f32, 4.0], 0.5)?;
/// assert_eq!((norm_sq, acc), (25.0, vec![1.5, 2.0]));
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
pub fn accumulate_scaled_and_measure<A: AccumulatorElement, G: Element>(
    acc: &mut [A],
    grad: &[G],
    weight: f64,
) -> Result<f64> {
    check_len("gradient", acc.len(), grad.len())?;
    let weight = A::from_f64(weight);
    let [norm_sq] = fold_mut(acc, grad, |a, g| {
        *a = a.plus_scaled(weight, g);
        let g = g.to_f64();
        [g * g]
    });
    Ok(norm_sq)
}

/// Adds `weight * grad` into `acc` and returns |grad|^2 and `acc . grad`, the latter with the accumulator as it was before.
///
/// With it the norm of the sum follows without a pass of its own: |a + w g|^2 = |a|^2 + 2 w a.g + w^2 |g|^2.
///
/// # Errors
/// [`Error::Length`] if the slices differ in length; nothing is added then.
///
/// # Examples
/// ```
/// let mut acc = vec![1.0f32, 2.0];
/// let m = adaptive_batch::accumulate_and_measure_dot(&mut acc, &[3.0f32, 4.0], 1.0)?;
/// assert_eq!((m.norm_sq, m.dot), (25.0, 11.0));
/// assert_eq!(acc, [4.0, 6.0]);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
pub fn accumulate_and_measure_dot<A: AccumulatorElement, G: Element>(
    acc: &mut [A],
    grad: &[G],
    weight: f64,
) -> Result<Measured> {
    check_len("gradient", acc.len(), grad.len())?;
    let weight = A::from_f64(weight);
    let [norm_sq, dot] = fold_mut(acc, grad, |a, g| {
        let (before, g64) = (a.to_f64(), g.to_f64());
        *a = a.plus_scaled(weight, g);
        [g64 * g64, before * g64]
    });
    Ok(Measured { norm_sq, dot })
}

/// Returns |grad|^2 without touching anything else.
///
/// # Examples
/// ```
/// assert_eq!(adaptive_batch::squared_norm(&[3.0f32, 4.0]), 25.0);
/// ```
pub fn squared_norm<G: Element>(grad: &[G]) -> f64 {
    let [norm_sq] = fold(grad, grad, |g, _| {
        let g = g.to_f64();
        [g * g]
    });
    norm_sq
}

/// Returns a . b with the same partial sums as the other passes.
///
/// # Errors
/// [`Error::Length`] if the slices differ in length.
///
/// # Examples
/// ```
/// assert_eq!(adaptive_batch::dot(&[1.0f32, 2.0], &[3.0f32, 4.0])?, 11.0);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
pub fn dot<A: Element, B: Element>(a: &[A], b: &[B]) -> Result<f64> {
    check_len("right-hand side", a.len(), b.len())?;
    let [dot] = fold(a, b, |x, y| [x.to_f64() * y.to_f64()]);
    Ok(dot)
}

/// Adds `weight * grad` into `acc` and measures nothing: plain accumulation with the threads of the other passes.
///
/// # Errors
/// [`Error::Length`] if the slices differ in length; nothing is added then.
///
/// # Examples
/// ```
/// let mut acc = vec![1.0f32];
/// adaptive_batch::accumulate(&mut acc, &[2.0f32], 0.5)?;
/// assert_eq!(acc, [2.0]);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
pub fn accumulate<A: AccumulatorElement, G: Element>(
    acc: &mut [A],
    grad: &[G],
    weight: f64,
) -> Result<()> {
    check_len("gradient", acc.len(), grad.len())?;
    let weight = A::from_f64(weight);
    let [] = fold_mut(acc, grad, |a, g| {
        *a = a.plus_scaled(weight, g);
        []
    });
    Ok(())
}

/// Returns |p|^2 of p = g / (sqrt(v / correction) + eps), the gradient as Adam's denominator sees it.
pub(crate) fn preconditioned_norm<G: Element>(grad: &[G], v: &[f32], adam: Adam) -> f64 {
    let [norm_sq] = fold(grad, v, |g, v| {
        let p = adam.apply(g.to_f64(), v);
        [p * p]
    });
    norm_sq
}

/// Adds `weight * grad` (without preconditioning) into `acc` and returns the norm of the preconditioned gradient.
pub(crate) fn accumulate_preconditioned<A: AccumulatorElement, G: Element>(
    acc: &mut [A],
    grad: &[G],
    v: &[f32],
    adam: Adam,
    weight: f64,
) -> f64 {
    let weight = A::from_f64(weight);
    let mut total = 0.0;
    // Three slices: the chunks are walked here, each by the sequential pass.
    for ((a, g), v) in acc
        .chunks_mut(CHUNK)
        .zip(grad.chunks(CHUNK))
        .zip(v.chunks(CHUNK))
    {
        let mut sum = 0.0;
        for ((a, &g), &v) in a.iter_mut().zip(g).zip(v) {
            *a = a.plus_scaled(weight, g);
            let p = adam.apply(g.to_f64(), v);
            sum += p * p;
        }
        total += sum;
    }
    total
}

/// Adam's denominator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Adam {
    pub(crate) eps: f64,
    /// 1 - beta2^t, what the second moment is divided by.
    pub(crate) correction: f64,
}

impl Adam {
    #[inline]
    fn apply(self, g: f64, v: f32) -> f64 {
        g / ((f64::from(v) / self.correction).sqrt() + self.eps)
    }
}

pub(crate) fn check_len(what: &str, expected: usize, got: usize) -> Result<()> {
    if expected == got {
        Ok(())
    } else {
        Err(Error::Length {
            what: what.to_owned(),
            expected,
            got,
        })
    }
}

/// Sums what `visit` returns for each pair of elements, `N` sums at once; `visit` may change the left element.
fn fold_mut<A, G, const N: usize>(
    acc: &mut [A],
    grad: &[G],
    visit: impl Fn(&mut A, G) -> [f64; N] + Sync,
) -> [f64; N]
where
    A: Copy + Send + Sync,
    G: Copy + Send + Sync,
{
    #[cfg(feature = "rayon")]
    if acc.len() >= PARALLEL_FROM && rayon::current_num_threads() > 1 {
        use rayon::prelude::*;
        let parts: Vec<[f64; N]> = acc
            .par_chunks_mut(CHUNK)
            .zip(grad.par_chunks(CHUNK))
            .map(|(a, g)| {
                dispatch(MutPass {
                    acc: a,
                    grad: g,
                    visit: &visit,
                })
            })
            .collect();
        return add_up(parts);
    }
    add_up(acc.chunks_mut(CHUNK).zip(grad.chunks(CHUNK)).map(|(a, g)| {
        dispatch(MutPass {
            acc: a,
            grad: g,
            visit: &visit,
        })
    }))
}

/// The same for two slices that stay as they are.
fn fold<A, B, const N: usize>(
    left: &[A],
    right: &[B],
    visit: impl Fn(A, B) -> [f64; N] + Sync,
) -> [f64; N]
where
    A: Copy + Send + Sync,
    B: Copy + Send + Sync,
{
    #[cfg(feature = "rayon")]
    if left.len() >= PARALLEL_FROM && rayon::current_num_threads() > 1 {
        use rayon::prelude::*;
        let parts: Vec<[f64; N]> = left
            .par_chunks(CHUNK)
            .zip(right.par_chunks(CHUNK))
            .map(|(a, b)| {
                dispatch(Pass {
                    left: a,
                    right: b,
                    visit: &visit,
                })
            })
            .collect();
        return add_up(parts);
    }
    add_up(left.chunks(CHUNK).zip(right.chunks(CHUNK)).map(|(a, b)| {
        dispatch(Pass {
            left: a,
            right: b,
            visit: &visit,
        })
    }))
}

fn add_up<const N: usize>(parts: impl IntoIterator<Item = [f64; N]>) -> [f64; N] {
    parts.into_iter().fold([0.0; N], |mut total, part| {
        for (t, p) in total.iter_mut().zip(part) {
            *t += p;
        }
        total
    })
}

/// A pass over one chunk, compiled for the vector units that `dispatch` finds.
trait ChunkPass {
    type Output;
    fn run(self) -> Self::Output;
}

/// Runs the pass with the widest vector instructions of this machine. Only the width changes: no fused multiply-add and
/// no other order of the additions, so every machine computes the same bits.
#[inline]
fn dispatch<P: ChunkPass>(pass: P) -> P::Output {
    #[cfg(feature = "simd")]
    {
        struct Wide<P>(P);
        impl<P: ChunkPass> pulp::NullaryFnOnce for Wide<P> {
            type Output = P::Output;
            #[expect(
                clippy::inline_always,
                reason = "must be compiled into the dispatching function"
            )]
            #[inline(always)]
            fn call(self) -> P::Output {
                self.0.run()
            }
        }
        pulp::Arch::new().dispatch(Wide(pass))
    }
    #[cfg(not(feature = "simd"))]
    pass.run()
}

struct MutPass<'a, A, G, F> {
    acc: &'a mut [A],
    grad: &'a [G],
    visit: &'a F,
}

impl<A: Copy, G: Copy, F: Fn(&mut A, G) -> [f64; N], const N: usize> ChunkPass
    for MutPass<'_, A, G, F>
{
    type Output = [f64; N];

    #[expect(
        clippy::inline_always,
        reason = "must be compiled into the dispatching function"
    )]
    #[inline(always)]
    fn run(self) -> [f64; N] {
        let mut lanes = [[0.0; LANES]; N];
        let (acc, acc_rest) = self.acc.as_chunks_mut::<LANES>();
        let (grad, grad_rest) = self.grad.as_chunks::<LANES>();
        for (a, g) in acc.iter_mut().zip(grad) {
            // Copies, so that no store can change what is still to be loaded: the compiler keeps all lanes in registers.
            let (mut x, y) = (*a, *g);
            let mut terms = [[0.0; LANES]; N];
            for lane in 0..LANES {
                let term = (self.visit)(&mut x[lane], y[lane]);
                for n in 0..N {
                    terms[n][lane] = term[n];
                }
            }
            *a = x;
            for n in 0..N {
                for lane in 0..LANES {
                    lanes[n][lane] += terms[n][lane];
                }
            }
        }
        for (lane, (a, &g)) in acc_rest.iter_mut().zip(grad_rest).enumerate() {
            let terms = (self.visit)(a, g);
            for n in 0..N {
                lanes[n][lane] += terms[n];
            }
        }
        lanes.map(add_lanes)
    }
}

struct Pass<'a, A, B, F> {
    left: &'a [A],
    right: &'a [B],
    visit: &'a F,
}

impl<A: Copy, B: Copy, F: Fn(A, B) -> [f64; N], const N: usize> ChunkPass for Pass<'_, A, B, F> {
    type Output = [f64; N];

    #[expect(
        clippy::inline_always,
        reason = "must be compiled into the dispatching function"
    )]
    #[inline(always)]
    fn run(self) -> [f64; N] {
        let mut lanes = [[0.0; LANES]; N];
        let (left, left_rest) = self.left.as_chunks::<LANES>();
        let (right, right_rest) = self.right.as_chunks::<LANES>();
        for (a, b) in left.iter().zip(right) {
            for lane in 0..LANES {
                let terms = (self.visit)(a[lane], b[lane]);
                for n in 0..N {
                    lanes[n][lane] += terms[n];
                }
            }
        }
        for (lane, (&a, &b)) in left_rest.iter().zip(right_rest).enumerate() {
            let terms = (self.visit)(a, b);
            for n in 0..N {
                lanes[n][lane] += terms[n];
            }
        }
        lanes.map(add_lanes)
    }
}

/// Pairwise, so that three roundings remain.
#[inline]
fn add_lanes(l: [f64; LANES]) -> f64 {
    ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]))
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the same additions give the same bits")]
mod tests {
    use super::*;

    fn ramp(n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0)
            .collect()
    }

    #[test]
    fn every_length_around_the_lanes_and_chunks_is_exact() {
        for n in [
            0,
            1,
            7,
            8,
            9,
            15,
            16,
            17,
            CHUNK - 1,
            CHUNK,
            CHUNK + 1,
            3 * CHUNK + 5,
        ] {
            let grad = ramp(n);
            let mut acc = vec![0.5f32; n];
            let want: f64 = grad.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
            let got = accumulate_and_measure(&mut acc, &grad).unwrap();
            assert!((got - want).abs() <= 1e-12 * want, "{n}: {got} {want}");
            assert!(acc.iter().zip(&grad).all(|(a, g)| *a == 0.5 + g));
            let m = accumulate_and_measure_dot(&mut acc, &grad, -2.0).unwrap();
            let want_dot: f64 = grad
                .iter()
                .map(|&g| f64::from(0.5 + g) * f64::from(g))
                .sum();
            assert!(
                (m.dot - want_dot).abs() <= 1e-12 * (want_dot.abs() + want),
                "{n}"
            );
            assert_eq!(m.norm_sq.to_bits(), got.to_bits());
        }
    }

    #[test]
    fn tiny_and_huge_gradients_neither_vanish_nor_overflow() {
        let tiny = vec![1e-30f32; 1000];
        assert!((squared_norm(&tiny) / (1e3 * f64::from(1e-30f32).powi(2)) - 1.0).abs() < 1e-12);
        let huge = vec![1e30f32; 1000];
        assert!((squared_norm(&huge) / (1e3 * f64::from(1e30f32).powi(2)) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn lengths_must_agree_and_nothing_is_added_otherwise() {
        let mut acc = vec![1.0f32; 3];
        let err = accumulate_and_measure(&mut acc, &[1.0f32; 4]).unwrap_err();
        assert_eq!(err.to_string(), "gradient has 4 elements, expected 3");
        assert_eq!(acc, [1.0; 3]);
        assert!(dot(&[1.0f32], &[1.0f32, 2.0]).is_err());
    }

    #[cfg(feature = "rayon")]
    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let n = PARALLEL_FROM + 12_345;
        let grad = ramp(n);
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            pool.install(|| {
                let mut acc = ramp(n);
                let m = accumulate_and_measure_dot(&mut acc, &grad, 0.3).unwrap();
                (m.norm_sq.to_bits(), m.dot.to_bits(), acc)
            })
        };
        let one = run(1);
        assert!(one == run(2) && one == run(5));
    }

    #[cfg(feature = "half")]
    #[test]
    fn half_precision_gradients_accumulate_in_f32() {
        let grad: Vec<half::bf16> = ramp(1000).into_iter().map(half::bf16::from_f32).collect();
        let mut acc = vec![0.0f32; 1000];
        let want: f64 = grad.iter().map(|g| f64::from(g.to_f32()).powi(2)).sum();
        let got = accumulate_and_measure(&mut acc, &grad).unwrap();
        assert!((got - want).abs() < 1e-12 * want);
        assert!(acc.iter().zip(&grad).all(|(a, g)| *a == g.to_f32()));
        let f16: Vec<half::f16> = grad
            .iter()
            .map(|g| half::f16::from_f32(g.to_f32()))
            .collect();
        assert!((squared_norm(&f16) - want).abs() < 1e-3 * want);
    }
}
