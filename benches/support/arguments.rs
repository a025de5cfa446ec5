//! Options of the programs that make tables: pairs of `--name value`.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use std::env;
use std::fmt::Display;
use std::str::FromStr;

use anyhow::{Context, Result, ensure};

/// The program's options in order. Cargo's own `--bench` is passed over; its `--test`, which asks
/// for a run that only shows that everything works, stands for the pairs of `smoke`.
pub fn pairs(smoke: &[(&str, &str)]) -> Result<Vec<(String, String)>> {
    let mut pairs = Vec::new();
    let mut args = env::args().skip(1);
    while let Some(name) = args.next() {
        match name.as_str() {
            "--bench" => {}
            "--test" => pairs.extend(
                smoke
                    .iter()
                    .map(|&(name, value)| (name.into(), value.into())),
            ),
            _ => {
                ensure!(name.starts_with("--"), "expected an option, got {name}");
                let value = args
                    .next()
                    .with_context(|| format!("{name} needs a value"))?;
                pairs.push((name, value));
            }
        }
    }
    Ok(pairs)
}

/// The value as a number of at least `least`.
pub fn number<T>(name: &str, value: &str, least: T) -> Result<T>
where
    T: FromStr + PartialOrd + Display + Copy,
{
    let number = value.parse().ok().filter(|number| *number >= least);
    number.with_context(|| format!("{name}: expected a number of at least {least}, got {value}"))
}

/// The parts between commas.
pub fn list(value: &str) -> Vec<String> {
    value.split(',').map(str::to_owned).collect()
}

/// The parts between commas, each of which must be one of `known`.
pub fn choices<const N: usize>(
    name: &str,
    value: &str,
    known: [&'static str; N],
) -> Result<Vec<&'static str>> {
    let choice = |part: &str| {
        let found = known.into_iter().find(|&known| known == part);
        found.with_context(|| format!("{name}: expected any of {}, got {part}", known.join(", ")))
    };
    value.split(',').map(choice).collect()
}
