// Every visible text whose contrast to what is under it is below 4.5 to 1 (WCAG 2.2 AA).
() => {
    const parse = text => {
        const numbers = text.match(/[\d.]+/g).map(Number);
        const unit = text.startsWith("color(") ? 255 : 1;
        return [...numbers.slice(0, 3).map(value => value * unit), numbers[3] ?? 1];
    };
    const over = (top, under) => [0, 1, 2].map(at => top[at] * top[3] + under[at] * (1 - top[3])).concat(1);
    const light = ([...channels]) => channels.slice(0, 3).map(value => value / 255)
        .map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
    const ground = node => {
        const own = parse(getComputedStyle(node).backgroundColor);
        return own[3] === 1 || !node.parentElement ? own : over(own, ground(node.parentElement));
    };
    const poor = [];
    for (const node of document.querySelectorAll("body *")) {
        const text = [...node.childNodes].filter(child => child.nodeType === 3).map(child => child.data.trim()).join("");
        if (!text || !node.checkVisibility()) continue;
        const style = getComputedStyle(node);
        const under = ground(node);
        const ink = over(parse(node instanceof SVGElement ? style.fill : style.color), under);
        const [dark, bright] = [light(ink), light(under)].sort((a, b) => a - b);
        const ratio = (bright + 0.05) / (dark + 0.05);
        if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${node.className.baseVal ?? node.className}: ${text.slice(0, 30)}`);
    }
    return poor;
}
