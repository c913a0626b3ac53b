use std::process::ExitCode;

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::new().filter_or("HPCRT_LOG", "warn"))
        .format_target(false)
        .format_timestamp_millis()
        .init();
    match hpcrt::cli::parse(std::env::args_os().skip(1).collect()).and_then(hpcrt::modes::run) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            hpcrt::error::say(&error);
            ExitCode::from(error.exit_code())
        }
    }
}
