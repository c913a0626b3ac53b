#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hpcrt_fuzz::bodies::forward(bytes));
