//! What the paper on DLM over MPI says of the same: times relative to runs in local memory alone, over the part of the memory that is local.
//! Numbers from its text (its faster network where it names two).

use anyhow::{Context, Result};

/// A program's.
pub(super) struct Curve {
    name: &'static str,
    /// Local memory in percent, relative time.
    pub(super) points: &'static [(f64, f64)],
}

const CURVES: [Curve; 7] = [
    Curve { name: "stream", points: &[(100.0, 1.0), (4.0, 2700.0 / 613.0)] },
    Curve { name: "himeno", points: &[(100.0, 1.0), (6.9, 2.5)] },
    Curve { name: "is", points: &[(40.7, 1.0), (30.5, 1.45), (4.06, 1.45), (2.0, 4.34)] },
    Curve { name: "cg", points: &[(100.0, 1.1), (40.0, 1.1), (36.0, 3.5), (4.17, 3.5)] },
    Curve { name: "mg", points: &[(100.0, 1.19), (15.0, 3.55), (5.7, 3.8)] },
    Curve { name: "ft", points: &[(100.0, 1.16), (19.38, 1.69), (14.89, 54.1)] },
    Curve { name: "bt", points: &[(100.0, 1.18), (61.84, 1.94), (60.0, 31.0)] },
];

/// By its name.
pub(super) fn find(name: &str) -> Result<&'static Curve> {
    CURVES.iter().find(|curve| curve.name == name).with_context(|| {
        let names: Vec<_> = CURVES.iter().map(|curve| curve.name).collect();
        format!("the paper has no {name}, but {}", names.join(", "))
    })
}
