//! Tests of `static-bootstrap/sys/src/instruction.rs`, against another decoder.

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Mnemonic};
use proptest::prelude::*;

use super::instruction::{Kind, decode};

/// Looks at the same bytes with both; whether ours knows them.
fn compare(code: &[u8]) -> bool {
    let mut decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    let theirs = decoder.decode();
    let Some(ours) = decode(code) else { return false };
    // What is none we may take for one.
    if theirs.is_invalid() {
        return true;
    }
    assert_eq!(ours.len, theirs.len(), "{theirs} in {code:02x?}");
    let target = |distance: i32| (ours.len as u64).wrapping_add_signed(distance.into());
    match ours.kind {
        Kind::Call => assert_eq!(theirs.code(), Code::Syscall, "{code:02x?}"),
        Kind::Enters => assert!(matches!(theirs.code(), Code::Sysenter | Code::Int_imm8), "{code:02x?}"),
        Kind::Jump { distance } => {
            assert_eq!(
                (theirs.mnemonic(), theirs.near_branch_target()),
                (Mnemonic::Jmp, target(distance)),
                "{code:02x?}"
            );
        }
        Kind::Branch { distance, condition } => {
            assert!(theirs.is_jcc_short_or_near(), "{theirs} in {code:02x?}");
            assert_eq!(theirs.near_branch_target(), target(distance), "{code:02x?}");
            assert_eq!(theirs.condition_code() as u8, condition + 1, "{theirs} in {code:02x?}");
        }
        Kind::Loop { distance } => assert_eq!(theirs.near_branch_target(), target(distance), "{theirs} in {code:02x?}"),
        Kind::Near { operand } => {
            assert!(theirs.is_ip_rel_memory_operand(), "{theirs} in {code:02x?}");
            let offsets = decoder.get_constant_offsets(&theirs);
            assert_eq!((offsets.displacement_offset(), offsets.displacement_size()), (operand, 4), "{theirs}");
        }
        Kind::Anywhere => {
            let stays = !theirs.is_ip_rel_memory_operand() && theirs.near_branch_target() == 0;
            let leads = theirs.flow_control() == FlowControl::ConditionalBranch || theirs.mnemonic() == Mnemonic::Call;
            assert!(stays && !leads, "{theirs} in {code:02x?}");
        }
        Kind::Fixed => {
            let eip = theirs.is_ip_rel_memory_operand();
            assert!(
                eip || matches!(
                    theirs.flow_control(),
                    FlowControl::Call | FlowControl::IndirectCall | FlowControl::XbeginXabortXend
                ),
                "{theirs} in {code:02x?}"
            );
        }
    }
    true
}

#[test]
fn ends_are_where_another_decoder_finds_them() {
    // Every beginning of opcodes, with prefixes, and every ModRM byte.
    let prefixes: [&[u8]; 9] =
        [&[], &[0x66], &[0xf3], &[0xf2], &[0x48], &[0x67], &[0x66, 0x48], &[0xf0], &[0x64, 0x41]];
    let maps: [&[u8]; 9] = [
        &[],
        &[0x0f],
        &[0x0f, 0x38],
        &[0x0f, 0x3a],
        &[0xc5, 0xf8],
        &[0xc4, 0xe2, 0x79],
        &[0xc4, 0xe3, 0x79],
        &[0x62, 0xf1, 0x7c, 0x48],
        &[0x8f, 0xe8, 0x78],
    ];
    for (prefix, map) in prefixes.iter().flat_map(|prefix| maps.iter().map(move |map| (prefix, map))) {
        for (opcode, modrm) in (0..=255).flat_map(|opcode| (0..=255).map(move |modrm| (opcode, modrm))) {
            let mut code = [prefix, *map, &[opcode, modrm]].concat();
            code.extend([0x25, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa]);
            compare(&code);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200_000))]
    #[test]
    fn any_bytes_end_there(code in proptest::array::uniform16(any::<u8>())) {
        compare(&code);
    }
}

#[test]
fn what_is_cut_off_is_none() {
    for code in [
        &[0x0f][..],
        &[0x48],
        &[0xb8, 1, 2, 3],
        &[0xe8, 0],
        &[0x66; 20],
        &[],
        &[0xc5],
        &[0x62, 0xf1],
        &[0x8b, 0x05, 0, 0],
    ] {
        assert_eq!(decode(code), None, "{code:02x?}");
    }
}
