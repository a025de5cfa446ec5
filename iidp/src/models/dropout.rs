//! Dropout whose masks depend on samples, not on where they are computed.

use burn::tensor::{Tensor, TensorData};

use crate::Error;
use crate::executor::mix;

/// Dropout with one random stream per sample: element i of sample s is dropped or kept by a counter-based generator
/// keyed with the sample's seed, so the mask is the same under any layout and on any device.
#[derive(Debug, Clone, Copy)]
pub struct SampleDropout<'a> {
    probability: f64,
    seeds: &'a [u64],
    site: u64,
}

impl<'a> SampleDropout<'a> {
    /// Drops elements with `probability`; `seeds` holds one seed per sample of the micro-batch, and is empty when nothing is to be
    /// dropped (evaluation).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] unless `0 <= probability < 1`.
    pub fn new(probability: f64, seeds: &'a [u64]) -> Result<Self, Error> {
        if (0.0..1.0).contains(&probability) {
            Ok(Self {
                probability,
                seeds,
                site: 0,
            })
        } else {
            Err(Error::Invalid {
                what: "dropout probability",
                problem: format!("got {probability}, expected at least 0 and less than 1"),
            })
        }
    }

    /// No dropout.
    pub const fn off() -> SampleDropout<'static> {
        SampleDropout {
            probability: 0.0,
            seeds: &[],
            site: 0,
        }
    }

    /// Applies dropout to `x`, of shape `[samples, ..]`, scaling what is kept by `1 / (1 - probability)`. Each call uses a
    /// new part of the random streams.
    ///
    /// # Panics
    ///
    /// If the first dimension of `x` is not the number of seeds.
    pub fn apply<const D: usize>(&mut self, x: Tensor<D>) -> Tensor<D> {
        if self.probability == 0.0 || self.seeds.is_empty() {
            return x;
        }
        let dims = x.dims();
        assert_eq!(
            dims[0],
            self.seeds.len(),
            "dropout: samples in the tensor and seeds differ"
        );
        let per_sample: usize = dims[1..].iter().product();
        let site = mix(self.site);
        self.site += 1;
        let keep = (1.0 - self.probability) as f32;
        let threshold = (self.probability * f64::from(u32::MAX)) as u32;
        let value = |bits: u32| if bits < threshold { 0.0 } else { 1.0 / keep };
        let mut mask = Vec::with_capacity(per_sample * self.seeds.len());
        for seed in self.seeds {
            let stream = seed ^ site;
            // One draw of 64 bits serves two elements.
            for pair in 0..per_sample.div_ceil(2) {
                let bits = mix(stream.wrapping_add(pair as u64));
                mask.push(value(bits as u32));
                if 2 * pair + 1 < per_sample {
                    mask.push(value((bits >> 32) as u32));
                }
            }
        }
        let mask = Tensor::from_data(TensorData::new(mask, dims), &x.device());
        x * mask
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn masks_follow_the_samples() {
        let device = Device::flex();
        let seeds = [11, 12, 13, 14];
        let ones = || Tensor::<2>::ones([4, 301], &device);
        let values = |x: Tensor<2>| x.into_data().try_to_vec::<f32>().unwrap();
        let mut all = SampleDropout::new(0.25, &seeds).unwrap();
        let (first, second) = (values(all.apply(ones())), values(all.apply(ones())));
        assert_ne!(first, second, "each site has its own masks");
        // The same samples in two micro-batches.
        for half in [0..2, 2..4] {
            let mut part = SampleDropout::new(0.25, &seeds[half.clone()]).unwrap();
            let x = Tensor::<2>::ones([2, 301], &device);
            assert_eq!(
                values(part.apply(x)),
                first[half.start * 301..half.end * 301]
            );
        }
        let kept = first.iter().filter(|x| **x != 0.0).count() as f64 / first.len() as f64;
        assert!((kept - 0.75).abs() < 0.05, "kept {kept}");
        assert!(
            first
                .iter()
                .all(|x| *x == 0.0 || (*x - 1.0 / 0.75).abs() < 1e-6)
        );
        assert!(SampleDropout::new(1.0, &seeds).is_err());
    }
}
