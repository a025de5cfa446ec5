//! A pipeline trains as one device does, over 50 steps.

mod blocks;

use blocks::{Run, difference_of_losses, difference_of_parameters, even, gpt};
use iidp::ParallelDims;

/// pp = 2, 3, 4, even and uneven stages, tied embeddings.
#[test]
fn a_pipeline_trains_as_one_device() {
    let run = Run::new(50, 2e-3);
    let task = gpt(true);
    let expected = run.one_device(&task, 1, 2);
    assert!(expected.losses[49] < 0.9 * expected.losses[0]);
    for pp in 2..=4 {
        let config = even(ParallelDims::new(1, 1, pp), 1, 2);
        let config = if pp == 2 {
            config.with_cuts(vec![1])
        } else {
            config
        };
        let (got, _) = run.hybrid(&task, config);
        let losses = difference_of_losses(&got, &expected);
        let parameters = difference_of_parameters(&got, &expected);
        assert!(
            losses < 1e-5,
            "pp = {pp}: losses off by {losses:e}, parameters by {parameters:e}"
        );
        // Adam divides a gradient by its size: where it is little more than rounding (biases of keys), so is the update.
        assert!(
            parameters < 1e-3,
            "pp = {pp}: parameters off by {parameters:e}"
        );
    }
}
