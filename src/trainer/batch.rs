//! How the last samples of a run are divided into steps.

/// The size of the next global batch when `remaining` samples are left: the wanted size, except near the end, where a step takes all that is left rather
/// than leave less than `smallest` (one micro-batch per rank) for a last one. All three are multiples of the local batch, so the result is one too.
pub(super) fn next_batch(wanted: usize, remaining: u64, smallest: usize) -> usize {
    let left = usize::try_from(remaining).unwrap_or(usize::MAX);
    if left <= wanted || left - wanted < smallest {
        left
    } else {
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::next_batch;

    #[test]
    fn every_step_can_be_laid_out_and_all_samples_are_used() {
        let local = 4;
        for ranks in 1..6 {
            let smallest = ranks * local;
            for wanted in (smallest..smallest + 64).step_by(local) {
                for samples in (smallest as u64..400).step_by(local) {
                    let mut remaining = samples;
                    while remaining > 0 {
                        let batch = next_batch(wanted, remaining, smallest);
                        assert!(
                            batch >= smallest && batch < wanted + smallest,
                            "{batch} for {wanted}, {remaining} left"
                        );
                        assert_eq!(batch % local, 0);
                        remaining -= batch as u64;
                    }
                }
            }
        }
    }
}
