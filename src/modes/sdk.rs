//! `hpcrt sdk DIR`: what programs that talk through hpcrt are written with.

use std::fs;
use std::path::Path;

use crate::Result;
use crate::error::Context;

const FILES: [(&str, &str); 8] = [
    ("libi.h", include_str!("../../sdk/libi.h")),
    ("libi.c", include_str!("../../sdk/libi.c")),
    ("frontend.c", include_str!("../../sdk/frontend.c")),
    ("member.c", include_str!("../../sdk/member.c")),
    ("dlm.h", include_str!("../../sdk/dlm.h")),
    ("matvec.c", include_str!("../../sdk/matvec.c")),
    ("collectives.sh", include_str!("../../examples/collectives.sh")),
    ("collectives.py", include_str!("../../examples/collectives.py")),
];

/// Writes the files; replaces those that are there.
pub(super) fn run(directory: &Path) -> Result<u8> {
    fs::create_dir_all(directory).op_on("make the directory", directory)?;
    for (name, text) in FILES {
        let path = directory.join(name);
        fs::write(&path, text).op_on("write", &path)?;
    }
    Ok(0)
}
