//! Measurements: end-to-end rows, and the cases that they describe.

mod case;
mod presets;
mod rows;

pub use case::{Case, CaseKey};
pub use rows::{MeasuredRow, Profile};
