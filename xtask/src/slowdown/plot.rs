//! The table as a drawing: slowdown over the part of the memory that is local, both logarithmic.

use std::fmt::Write;

use super::paper::Curve;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 360.0;
const MARGIN: f64 = 50.0;
/// Percent at the left and at the right; slowdown at the bottom.
const LEFT: f64 = 100.0;
const RIGHT: f64 = 2.0;
const BOTTOM: f64 = 0.8;

/// An SVG file.
pub(super) fn draw(program: &str, points: &[(f64, f64)], paper: Option<&Curve>) -> String {
    let theirs = paper.map_or(&[][..], |curve| curve.points);
    let top = points.iter().chain(theirs).fold(8.0f64, |top, (_, slower)| top.max(*slower)) * 1.25;
    let across = |ratio: f64| MARGIN + (LEFT / ratio).ln() / (LEFT / RIGHT).ln() * (WIDTH - 2.0 * MARGIN);
    let up = |slower: f64| HEIGHT - MARGIN - (slower / BOTTOM).ln() / (top / BOTTOM).ln() * (HEIGHT - 2.0 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n"
    );
    let mut line = |text: String| {
        let _ = writeln!(svg, "{text}");
    };
    for ratio in [100.0, 50.0, 25.0, 10.0, 4.0, 2.0] {
        let x = across(ratio);
        line(format!("<path d=\"M{x:.1} {:.1}V{:.1}\" stroke=\"#ddd\"/>", up(BOTTOM), up(top)));
        line(format!("<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{ratio}</text>", HEIGHT - MARGIN + 16.0));
    }
    for slower in [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0].into_iter().filter(|slower| *slower < top) {
        let y = up(slower);
        line(format!("<path d=\"M{MARGIN} {y:.1}H{:.1}\" stroke=\"#ddd\"/>", WIDTH - MARGIN));
        line(format!("<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{slower}</text>", MARGIN - 6.0, y + 4.0));
    }
    let title = program.replace('&', "&amp;").replace('<', "&lt;");
    line(format!(
        "<text x=\"{MARGIN}\" y=\"20\">{title}: times slower, over percent of its memory that is local</text>"
    ));
    let curves = [(points, "#06c", "", "hpcrt"), (theirs, "#c60", "6 4", "DLM-MPI (its paper)")];
    for (nth, (points, colour, dashes, name)) in curves.into_iter().enumerate().filter(|(_, curve)| !curve.0.is_empty())
    {
        let places: Vec<_> = points.iter().map(|(x, y)| format!("{:.1} {:.1}", across(*x), up(*y))).collect();
        let d = places.join("L");
        line(format!(
            "<path d=\"M{d}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\"/>"
        ));
        for (x, y) in points {
            line(format!("<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>", across(*x), up(*y)));
        }
        let y = MARGIN + 16.0 * nth as f64;
        line(format!("<text x=\"{:.1}\" y=\"{y}\" fill=\"{colour}\">{name}</text>", MARGIN + 10.0));
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_more_is_higher_and_less_memory_is_further_right() {
        let svg = draw("a<b", &[(100.0, 1.0), (10.0, 4.0)], None);
        let circles: Vec<Vec<f64>> = svg
            .lines()
            .filter(|line| line.starts_with("<circle"))
            .map(|line| line.split('"').skip(1).step_by(2).take(2).map(|n| n.parse().unwrap()).collect())
            .collect();
        assert!(circles[0][0] < circles[1][0] && circles[0][1] > circles[1][1], "{circles:?}");
        assert!(svg.contains("a&lt;b") && !svg.contains("DLM"));
    }
}
