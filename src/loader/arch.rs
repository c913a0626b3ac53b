//! What differs between processors in the search for libraries, in one table. Sources: glibc's `sysdeps/*/dl-procinfo*`,
//! `ldconfig.h`, `dl-hwcaps_subdirs.c` and the x86-64 psABI's micro-architecture levels.

use std::ffi::{OsStr, OsString};

/// A machine whose programs can be resolved.
#[derive(Debug)]
pub struct Arch {
    /// `e_machine`.
    machine: u16,
    is_64: bool,
    /// As musl spells it in `/lib/ld-musl-NAME.so.1`.
    pub musl_name: &'static str,
    /// Flags of the entries in `ld.so.cache` that are for this machine.
    pub cache_flags: &'static [u32],
    /// Searched last, where the dynamic linker does not tell its own.
    pub default_dirs: &'static [&'static str],
    /// `AT_PLATFORM`.
    platform: &'static str,
    /// Bits of the hwcap field in old entries of `ld.so.cache`, with the name of the subdirectory each stands for.
    legacy_bits: &'static [(u32, &'static str)],
    detect: fn(&mut Cpu),
}

static ARCHES: &[Arch] = &[
    Arch {
        machine: 62,
        is_64: true,
        musl_name: "x86_64",
        cache_flags: &[0x303],
        default_dirs: &[
            "/lib/x86_64-linux-gnu",
            "/usr/lib/x86_64-linux-gnu",
            "/lib64",
            "/usr/lib64",
            "/lib",
            "/usr/lib",
        ],
        platform: "x86_64",
        legacy_bits: &[(1, "x86_64"), (2, "avx512_1"), (50, "haswell"), (51, "xeon_phi"), (63, "tls")],
        detect: x86_64::detect,
    },
    Arch {
        machine: 183,
        is_64: true,
        musl_name: "aarch64",
        cache_flags: &[0xa03],
        default_dirs: &[
            "/lib/aarch64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/lib64",
            "/usr/lib64",
            "/lib",
            "/usr/lib",
        ],
        platform: "aarch64",
        legacy_bits: &[(63, "tls")],
        detect: |_| {},
    },
    Arch {
        machine: 3,
        is_64: false,
        musl_name: "i386",
        cache_flags: &[0x3],
        default_dirs: &["/lib/i386-linux-gnu", "/usr/lib/i386-linux-gnu", "/lib", "/usr/lib"],
        platform: "i686",
        legacy_bits: &[(63, "tls")],
        detect: |_| {},
    },
];

/// The row for an ELF file's machine and word size.
pub fn of(machine: u16, is_64: bool) -> Option<&'static Arch> {
    ARCHES.iter().find(|arch| arch.machine == machine && arch.is_64 == is_64)
}

/// What a dynamic linker of `arch` finds out about the processor it runs on.
#[derive(Debug)]
pub struct Cpu {
    pub arch: &'static Arch,
    /// Subdirectories of `glibc-hwcaps` that are searched, best first.
    pub hwcaps: Vec<OsString>,
    /// `$PLATFORM`.
    pub platform: Option<OsString>,
    /// Names of the subdirectories that glibc before 2.37 also combines, besides `tls` and the platform; most significant first.
    pub legacy: Vec<&'static str>,
}

impl Cpu {
    /// The processor of this machine, as programs of `arch` see it.
    pub fn detect(arch: &'static Arch) -> Cpu {
        let mut cpu = Cpu { arch, hwcaps: Vec::new(), platform: Some(arch.platform.into()), legacy: Vec::new() };
        (arch.detect)(&mut cpu);
        cpu
    }

    /// Whether all bits of an old cache entry are features that this processor has.
    pub fn has_legacy_bits(&self, bits: u64) -> bool {
        (0..64).filter(|bit| bits >> bit & 1 == 1).all(|bit| {
            self.arch.legacy_bits.iter().any(|&(number, name)| {
                number == bit
                    && (name == "tls"
                        || self.legacy.contains(&name)
                        || self.platform.as_deref() == Some(OsStr::new(name)))
            })
        })
    }
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use super::Cpu;
    use std::arch::is_x86_feature_detected as has;

    pub(super) fn detect(cpu: &mut Cpu) {
        let v2 = has!("cmpxchg16b") & has!("popcnt") & has!("sse3") & has!("ssse3") & has!("sse4.1") & has!("sse4.2");
        let haswell = has!("avx2") & has!("bmi1") & has!("bmi2") & has!("lzcnt") & has!("movbe") & has!("popcnt");
        let v3 = v2 & haswell & has!("avx") & has!("f16c") & has!("fma") & has!("xsave");
        let avx512 = has!("avx512cd") & has!("avx512bw") & has!("avx512dq") & has!("avx512vl");
        let v4 = v3 & avx512 & has!("avx512f");
        let levels = [(v4, "x86-64-v4"), (v3, "x86-64-v3"), (v2, "x86-64-v2")];
        cpu.hwcaps = levels.into_iter().filter(|(has, _)| *has).map(|(_, name)| name.into()).collect();
        // glibc names only Intel's processors this way.
        let intel = std::arch::x86_64::__cpuid(0).ebx == u32::from_le_bytes(*b"Genu");
        if intel && avx512 {
            cpu.legacy.push("avx512_1");
        }
        cpu.legacy.push("x86_64");
        if intel && haswell {
            cpu.platform = Some("haswell".into());
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod x86_64 {
    /// A program for another processor runs, if at all, under an emulator of the base level.
    pub(super) fn detect(_: &mut super::Cpu) {}
}
