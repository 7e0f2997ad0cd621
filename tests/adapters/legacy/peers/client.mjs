// The client of the official TypeScript SDK: `node client.mjs NODE_MODULES TARGET` prints what it saw, as JSON.
// TARGET is JSON: {"url", "token"} or {"command", "args"}. What it prints has the shape of client_1x.py's.

const [modules, target] = [process.argv[2], JSON.parse(process.argv[3])];
const sdk = (path) => import(`${modules}/@modelcontextprotocol/sdk/dist/esm/${path}.js`);
const { Client } = await sdk('client/index');
const { StreamableHTTPClientTransport } = await sdk('client/streamableHttp');
const { StdioClientTransport } = await sdk('client/stdio');
const types = await sdk('types');

const RELATED_TASK = 'io.modelcontextprotocol/related-task';
const until = async (condition) => {
  for (const ends = Date.now() + 60_000; !(await condition()); ) {
    if (Date.now() > ends) throw new Error(`waited too long until ${condition}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
};
const codeOf = (request) => request.then(() => 0, (error) => error.code);

const seen = { asked: [] };
const notified = [];
const client = new Client({ name: 'typescript', version: '1' }, { capabilities: { elicitation: {}, sampling: {} } });
client.setNotificationHandler(types.TaskStatusNotificationSchema, ({ params }) => { notified.push(params); });
client.setRequestHandler(types.ElicitRequestSchema, ({ params }) => {
  seen.asked.push(params._meta[RELATED_TASK].taskId);
  return { action: 'accept', content: { confirm: true } };
});
client.setRequestHandler(types.CreateMessageRequestSchema, () => (
  { role: 'assistant', model: 'small', content: { type: 'text', text: 'Short.' } }
));
const headers = target.token ? { Authorization: `Bearer ${target.token}` } : {};
await client.connect(target.url
  ? new StreamableHTTPClientTransport(new URL(target.url), { requestInit: { headers } })
  : new StdioClientTransport(target));
const tasks = client.experimental.tasks;

const start = async (name, args = {}, task = {}, options = {}) =>
  (await client.request({ method: 'tools/call', params: { name, arguments: args } }, types.CreateTaskResultSchema, { task, ...options })).task;
const textOf = async ({ taskId }) => {
  const result = await tasks.getTaskResult(taskId, types.CallToolResultSchema);
  if (result._meta[RELATED_TASK].taskId !== taskId) throw new Error('the result has not the mark of its task');
  return result.content[0].text;
};

seen.declared = Object.keys(client.getServerCapabilities().tasks).sort();
const { tools } = await client.listTools();
seen.support = Object.fromEntries(tools.filter((tool) => tool.execution).map((tool) => [tool.name, tool.execution.taskSupport]));
await until(async () => { await textOf(await start('add', { a: 1, b: 2 })); return notified.length > 0; });

const messages = [];
const stream = tasks.callToolStream({ name: 'add', arguments: { a: 1, b: 2 } }, types.CallToolResultSchema, { task: { ttl: 60_000 } });
for await (const message of stream) messages.push(message);
const added = messages[0].task;
const polled = messages.filter((message) => message.type === 'taskStatus').map((message) => message.task.status);
seen.added = [added.status, added.ttl, polled.at(-1), messages.at(-1).result.content[0].text];
seen.greeted = (await client.callTool({ name: 'greet', arguments: { name: 'Ada' } })).content[0].text;

const refused = await start('refuse');
await textOf(refused).catch((error) => {
  seen.replayed = [error.code, error.message.replace(/^MCP error -?\d+: /, ''), error.data];
});
const broken = await start('break_down');
const { isError } = await tasks.getTaskResult(broken.taskId, types.CallToolResultSchema);
seen.broken = [isError, (await tasks.getTask(broken.taskId)).status];

const held = await start('hold');
seen.cancelled = (await tasks.cancelTask(held.taskId)).status;
seen.codes = {
  'cancel again': await codeOf(tasks.cancelTask(held.taskId)),
  'never a task': await codeOf(start('greet', { name: 'Ada' })),
  'only a task': await codeOf(client.request({ method: 'tools/call', params: { name: 'add', arguments: { a: 1, b: 2 } } }, types.CallToolResultSchema)),
  unknown: await codeOf(tasks.getTask('tsk_unknown')),
};
seen.listed = await tasks.listTasks().then((page) => page.tasks.some((task) => task.taskId === added.taskId), (error) => error.code);

const confirmed = await start('confirm');
seen.confirmed = await textOf(confirmed);
seen.asked = seen.asked.map((taskId) => taskId === confirmed.taskId);
seen.sampled = await textOf(await start('summarize'));

seen.progress = [];
const counted = await start('count', {}, {}, { onprogress: ({ progress }) => { seen.progress.push(progress); } });
await until(() => notified.some((task) => task.taskId === counted.taskId));
await client.close();
console.log(JSON.stringify(seen));
